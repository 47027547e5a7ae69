"""Find what a plugin does that the contract does not allow, before any of its hooks is called.

pluggy passes or words badly most of it: hooks left out, misspelt, unmarked or marked as wrappers, arguments with
defaults. It reads the plugin's functions and calls none.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import attrs
import pluggy
from attrs import frozen

import expertstream.hookspecs as hookspecs


@frozen
class PluginHooks:
    """What a plugin implements: the hooks' names, and the attrs class of its options, None where it has none.

    `problems` are sentences, each naming a hook and what to do; the rest is of use only where there are none.
    """

    implemented: frozenset[str]
    options_class: type[attrs.AttrsInstance] | None
    problems: tuple[str, ...]


def marked_hooks(plugin: object) -> dict[str, Callable[..., Any]]:
    """The functions of a plugin that are marked `@hookimpl`, by the hook that each says to implement."""
    return {hook: function for hook, (function, _) in _marked(plugin).items()}


def check_hooks(plugin: object) -> PluginHooks:
    """The hooks of a plugin, held to `expertstream.hookspecs`."""
    marked = _marked(plugin)
    problems = list(_problems_of_names(plugin, marked, hookspecs.REQUIRED))
    for hook, (function, is_wrapper) in marked.items():
        if hook not in _ARGUMENTS:
            continue
        if is_wrapper:
            problems.append(f"{hook} is marked as a wrapper, but a backend answers its hooks: mark it with @hookimpl")
        problems += _problems_of_arguments(hook, function)
    options_class, problem = _options_class(marked["configure"][0]) if "configure" in marked else (None, None)
    if problem:
        problems.append(problem)
    return PluginHooks(frozenset(marked), options_class, tuple(problems))


def check_observer(observer: object) -> tuple[str, ...]:
    """What would keep hooks of an observer from being called, in sentences like those of `PluginHooks.problems`."""
    marked = _marked(observer)
    problems = list(_problems_of_names(observer, marked, required=frozenset()))
    for hook, (function, _) in marked.items():
        if hook in _ARGUMENTS:
            problems += _problems_of_arguments(hook, function)
    return tuple(problems)


def _specified() -> Mapping[str, tuple[str, ...]]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    names = [name for name in vars(hookspecs) if manager.parse_hookspec_opts(hookspecs, name) is not None]
    return {name: tuple(inspect.signature(getattr(hookspecs, name)).parameters) for name in names}


_ARGUMENTS = _specified()
"""Every hook of the contract with the names of its arguments."""

_Marked = dict[str, tuple[Callable[..., Any], bool]]
"""By hook: the function, and whether it is a wrapper."""


def _marked(plugin: object) -> _Marked:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    found: _Marked = {}
    for name in dir(plugin):
        marks = manager.parse_hookimpl_opts(plugin, name)
        if marks is not None:
            found[marks["specname"] or name] = getattr(plugin, name), marks["wrapper"] or marks["hookwrapper"]
    return found


def _problems_of_names(plugin: object, marked: _Marked, required: Collection[str]) -> Iterable[str]:
    absent = [hook for hook in _ARGUMENTS if hook not in marked]
    explained = set()
    for name in marked.keys() - _ARGUMENTS.keys():
        near = get_close_matches(name, absent, 1) or get_close_matches(name, _ARGUMENTS, 1)
        explained.update(near)
        yield f"{name} is not a hook: " + (f"rename it {near[0]}" if near else f"hooks are {', '.join(_ARGUMENTS)}")
    functions = [name for name in dir(plugin) if name not in _ARGUMENTS and inspect.isroutine(getattr(plugin, name))]
    for hook in absent:
        if hook in explained:
            continue
        if inspect.isroutine(getattr(plugin, hook, None)):
            yield f"{hook} is not marked, so it would never be called: mark it with @hookimpl"
        elif hook in required:
            near = get_close_matches(hook, functions, 1)
            remedy = f"if it is {near[0]}, rename that and" if near else "write it and"
            yield f"the hook {hook} is missing: {remedy} mark it with @hookimpl"


def _problems_of_arguments(hook: str, function: Callable[..., Any]) -> Iterable[str]:
    known = _ARGUMENTS[hook]
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD):
            yield f"{hook} takes {argument}, which is never passed: write the arguments that it needs, {_listed(known)}"
        elif argument.default is not argument.empty:
            yield f"{hook} has a default for {argument.name}, which would then never be passed: remove the default"
        elif argument.name not in known:
            near = get_close_matches(argument.name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"the hook has {_listed(known)}"
            yield f"{hook} takes {argument.name}, an argument that the hook does not have: {remedy}"


def _listed(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _options_class(configure: Callable[..., Any]) -> tuple[type[attrs.AttrsInstance] | None, str | None]:
    """The class that `configure` takes, or what is wrong with how it says so."""
    how = "write configure(options: YourOptions) with an attrs class of the module, or remove it"
    try:
        annotated = typing.get_type_hints(configure).get("options")
        if isinstance(annotated, type) and attrs.has(annotated):
            attrs.resolve_types(annotated)
            return annotated, None
    except (NameError, TypeError, AttributeError) as error:
        return None, f"configure has annotations that cannot be resolved at run time ({error}): {how}"
    return None, f"configure does not say by the annotation of its argument which options there are: {how}"
