"""`expertstream plan`: the memory that a run would take, decided by the same code and numbers, nothing loaded."""

from __future__ import annotations

from expertstream_engine.cli.consoles import print_json, print_table, say, starting
from expertstream_engine.cli.errors import guarded
from expertstream_engine.cli.options import (
    AsJson,
    BackendName,
    BackendOptions,
    ConfigFile,
    Context,
    Debug,
    ExpertMemory,
    HostMemory,
    HostTier,
    ModelArgument,
    Policy,
    Threads,
    Verbose,
    model_from,
    settings_from,
)


@guarded
def plan(
    model: ModelArgument = None,
    expert_memory: ExpertMemory = None,
    host_memory: HostMemory = None,
    host_tier: HostTier = None,
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
    with starting():
        settings = settings_from(
            config,
            expert_memory=expert_memory,
            host_memory=host_memory,
            host_tier=host_tier,
            context=context,
            backend=backend,
            backends=backend_option,
            policy=policy,
            threads=threads,
        )
        from expertstream import format_bytes
        from expertstream_engine.demand import plan_run
        from expertstream_engine.report import rss_bytes

        run = plan_run(model_from(model), settings)
    backend_name, planned = run.backend.name, run.plan
    # What a run has in use when it has come this far; the kernels' code comes on top.
    interpreter_bytes = rss_bytes()
    if as_json:
        of_run = {"backend": backend_name, "policy": settings.policy, "interpreter_bytes": interpreter_bytes}
        print_json(of_run | planned.to_json())
        return
    print_table(
        ("", ""),
        [
            ("backend", backend_name),
            ("policy", settings.policy),
            *planned.as_table(),
            ("Python and its libraries", f"about {format_bytes(interpreter_bytes)}, beside the total"),
        ],
    )
    for note in planned.notes:
        say(f"note: {note}")
