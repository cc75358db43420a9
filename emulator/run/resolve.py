"""First step of a simulated run: options -> checked parts. Reads no samples and starts nothing.

The only file that this step reads is that of the device profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.rounds.asynchronous.options import check_asynchronous, options_of
from coordinator.rounds.privacy_accounting import check_private
from coordinator.rounds.round import EvaluationPlan
from coordinator.rounds.sealed_round import is_sealed
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import batch_size, make_method
from edge_client.errors import UsageError
from emulator.engines.base import check_engine
from emulator.options import OPTIONS, SimulateArgs
from emulator.run.own_metrics import Metric
from emulator.run.settings import RunSettings
from emulator.simulation.attacks import AttackSpec, parse_attack
from emulator.simulation.codec_channel import channel_factory
from emulator.simulation.device_profiles import DEVICE_PROFILES
from emulator.simulation.profile_files import read_profiles


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """The options, and the method, the settings of the rounds and the attack that the options name."""

    args: SimulateArgs
    strategy: Strategy
    settings: RunSettings
    attack: AttackSpec


def resolve_run(
    args: SimulateArgs, *, strategy: Strategy | None = None, metrics: Mapping[str, Metric] | None = None
) -> ResolvedRun:
    """Check every option that needs no samples. Raises UsageError, ConfigError.

    `strategy` is the method itself, where the caller has it; `metrics` are the caller's own.
    """
    for row in OPTIONS.values():
        row.check(getattr(args, row.name))
    check_engine(args.engine)
    if args.ray and args.workers > 1:
        raise UsageError("--ray and --workers", hint="use one of them: a cluster has its own processes")
    evaluation = EvaluationPlan(every=args.evaluate_every, fraction=args.fraction_evaluate)
    strategy = make_method(args.method, **args.settings) if strategy is None else strategy
    check_private(strategy)
    sealed: bool = is_sealed(strategy)
    if sealed:
        _check_sealed_options(args)
    asynchronous = options_of(args.concurrency, args.buffer, args.max_staleness, wrong=UsageError)
    if asynchronous is not None:
        check_asynchronous(strategy, {})
    settings = RunSettings(
        rounds=args.rounds,
        seed=args.seed,
        batch=batch_size(strategy),
        profiles=DEVICE_PROFILES if args.profiles is None else read_profiles(args.profiles),
        evaluation=evaluation,
        asynchronous=asynchronous,
        channel=channel_factory(args.codec),
        metrics=metrics or {},
    )
    return ResolvedRun(args=args, strategy=strategy, settings=settings, attack=parse_attack(args.hostile))


def _check_sealed_options(args: SimulateArgs) -> None:
    """Refuse what works on single updates. Raises UsageError."""
    if args.codec != SimulateArgs.codec:
        raise UsageError(
            f"secure with codec {args.codec}: sums of whole numbers travel, not floats",
            hint="set secure-bits, 16 to 32, and leave codec out",
        )
    if args.hostile:
        raise UsageError(
            "secure with hostile: no update is checked on the server, and none is altered here",
            hint="leave hostile out, or set secure = off",
        )
