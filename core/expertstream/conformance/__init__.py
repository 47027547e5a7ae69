"""The tests that any backend must pass, for any installed one: `pytest -p expertstream.conformance --backend NAME`.

They use the backend through the public names alone, as the core does. A backend's distribution may add tests and
fixtures of its own: an entry point of the backend's name in the group `expertstream.conformance`, a package.
"""

pytest_plugins = ("expertstream.conformance.plugin",)
