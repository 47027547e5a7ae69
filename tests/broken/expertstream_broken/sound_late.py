"""Not broken: the backend that most of the broken ones are made from."""

from expertstream_broken.sound import *  # noqa: F403  # every hook

EXPERTSTREAM_CONTRACT = 1
