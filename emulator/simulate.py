"""`fedcenters-emulator simulate`: the run that the options name, as `fc.simulate` runs it, as the command prints it."""

from __future__ import annotations

from emulator.api.play import play
from emulator.options import SimulateArgs
from emulator.run.execute import Progress
from emulator.run.folder import Say
from emulator.run.resolve import resolve_run
from emulator.run.summary import Record


def simulate_json(
    args: SimulateArgs,
    progress: Progress = lambda _: None,
    *,
    resume: bool = False,
    say: Say = lambda _: None,
    busy: Say = lambda _: None,
) -> Record:
    """Run, write the run's folder, and give the JSON object that the command prints.

    `resume`: start from the folder's checkpoint, where the run may have more rounds than before; ConfigError when there
    is none. `say` is told of a run that was there before, `busy` what is prepared.
    """
    run = play(resolve_run(args), resume=resume, say=say, busy=busy)
    try:
        while True:
            so_far = next(run)
            progress({**so_far.run.records[-1], "real_seconds": so_far.run.real_seconds[-1]})
    except StopIteration as done:
        summary: Record = done.value.summary()
        return summary
    except KeyboardInterrupt as stopped:  # also between two rounds
        run.throw(stopped)  # it says what it keeps
        raise
