"""`expertstream plan`: the memory that a run would take, decided by the same code and numbers, nothing loaded."""

from __future__ import annotations

from expertstream_engine.cli.consoles import print_json, print_table, say
from expertstream_engine.cli.errors import guarded
from expertstream_engine.cli.options import (
    AsJson,
    BackendName,
    BackendOptions,
    ConfigFile,
    Context,
    Debug,
    ExpertMemory,
    ModelArgument,
    Policy,
    Threads,
    Verbose,
    settings_from,
)


@guarded
def plan(
    model: ModelArgument,
    expert_memory: ExpertMemory = None,
    context: Context = None,
    backend: BackendName = None,
    backend_option: BackendOptions = None,
    policy: Policy = None,
    threads: Threads = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Show what a run would take of this machine's memory, or why it would be refused; reads only the file's header."""
    settings = settings_from(
        config,
        expert_memory=expert_memory,
        context=context,
        backend=backend,
        backends=backend_option,
        policy=policy,
        threads=threads,
    )
    from expertstream_engine.demand import plan_run

    run = plan_run(model, settings)
    backend_name, planned = run.backend.name, run.plan
    if as_json:
        print_json({"backend": backend_name, "policy": settings.policy} | planned.to_json())
        return
    print_table(("", ""), [("backend", backend_name), ("policy", settings.policy), *planned.as_table()])
    for note in planned.notes:
        say(f"note: {note}")
