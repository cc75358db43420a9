"""`run_drill` plays all attacks on a loopback copy, of a user's configuration where one is given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.artifacts.signed_program import prepare_program
from coordinator.attack_drill import tiny_program
from coordinator.attack_drill.findings import NO_SINGLE, NO_SUMS, Attack, Copy, Finding, Seen
from coordinator.attack_drill.loopback_copy import (
    FEDERATION,
    FLEET,
    SUM_FLEET,
    Installation,
    installation,
    loopback_copy,
)
from coordinator.attack_drill.message_attacks import MESSAGE_ATTACKS
from coordinator.attack_drill.page_attacks import PAGE_ATTACKS, pages_copy
from coordinator.attack_drill.played_round import RoundsCopy
from coordinator.attack_drill.round_attacks import ROUND_ATTACKS
from coordinator.attack_drill.sum_attacks import SUM_ATTACKS
from coordinator.attack_drill.transfer_attacks import TRANSFER_ATTACKS
from coordinator.config import CoordinatorConfig
from coordinator.config_sections import BundleConfig, DashboardConfig, TlsConfig, WebConfig
from coordinator.identity.broker_acl import COORDINATOR_CLIENT_ID
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import find_mosquitto
from coordinator.storage.privacy_noise_key import open_noise_key
from coordinator.storage.store import Store
from edge_client.errors import FedcentersError, RuntimeMissing
from edge_client.protocol.secure.parameters import LEAST_COHORT

BLOCK = 4_096  # so that updates of small models have several blocks
MIN_DEADLINE_S = 120.0  # an idle credit returns after 30 s
Reporter = Callable[[Finding], None]


def run_drill(say: Reporter, config: CoordinatorConfig | None, *, tell: Callable[[str], None]) -> list[Finding]:
    """Play all attacks, one after another; each finding is also told at once, and by `tell` what takes long.

    Of `config` the copy has the model, the method of the served run, and the limits; without one, a tiny model and
    FedAvg, with `secure` and without. Where that run adds masked updates, those are attacked in its rounds, else single
    ones. Raises RuntimeMissing without mosquitto, ConfigError for a method or model that cannot be had.
    """
    program = find_mosquitto()
    if program is None:
        raise RuntimeMissing("the drill needs mosquitto on this machine", hint="apt install mosquitto")
    found: list[Finding] = []

    def play(attacks: Sequence[Attack[Copy]], here: Copy) -> None:
        for attack in attacks:
            finding = Finding(tried=attack.tried, bound=attack.bound, where=attack.where, seen=_seen(attack, here))
            say(finding)
            found.append(finding)

    with tempfile.TemporaryDirectory(prefix="attack-drill-") as name, installation(Path(name), program) as site:
        given = copied_config(config or tiny_program.config(site.folder), site)
        single, sums = None if _is_summed(given) else given, given if _is_summed(given) else None
        if config is None:
            sums = copied_config(tiny_program.config(site.folder, secure="updates"), site)
        with loopback_copy(site, given) as here:
            play(MESSAGE_ATTACKS, here)
        with pages_copy(site, given) as pages:
            play(PAGE_ATTACKS, pages)
        for attacks, played, why in (
            ((*ROUND_ATTACKS, *TRANSFER_ATTACKS), single, NO_SINGLE),
            (SUM_ATTACKS, sums, NO_SUMS),
        ):
            if played is None:
                play([_untried(attack, why) for attack in attacks], None)
            elif attacks:
                play(attacks, prepare_rounds(site, played, tiny=config is None, tell=tell))
    return found


def _is_summed(config: CoordinatorConfig) -> bool:
    return bool(config.runs[0].settings.get("secure", "off") != "off")


def _untried(attack: Attack[RoundsCopy], why: Seen) -> Attack[None]:
    return Attack(tried=attack.tried, bound=attack.bound, where=attack.where, play=lambda _: why)


def _seen(attack: Attack[Copy], here: Copy) -> Seen:
    try:
        return attack.play(here)
    except FedcentersError as wrong:
        return Seen(held=False, words=wrong.message)
    except OSError as wrong:  # of a connection
        return Seen(held=False, words=str(wrong))


def copied_config(config: CoordinatorConfig, site: Installation) -> CoordinatorConfig:
    """What a copy plays of a configuration: one round of the served run, with this site's broker and keys.

    Every device is asked and waited for, also where the run has no rounds, and nothing is exported. A sum is of as few
    devices as there may be.
    """
    run = next(run for run in config.runs if run.name == config.served_run)
    settings = dict(run.settings) | {key: 1.0 for key in ("fraction-train",) if key in run.settings}
    settings |= {key: LEAST_COHORT for key in ("least-members",) if key in settings}
    summed = settings.get("secure", "off") != "off"
    credentials, fleet = site.credentials(COORDINATOR_CLIENT_ID), len(SUM_FLEET if summed else FLEET) + 1
    return replace(
        config,
        federation=FEDERATION,
        broker=site.work.plan.broker,
        folder=site.folder,
        signing_folder=site.work.folder / "coordinator",
        tls=TlsConfig(ca=credentials.ca, certificate=credentials.certificate, key=credentials.key),
        runs=(replace(run, rounds=1, settings=settings),),
        model=replace(config.model, engines=config.model.engines[:1]),
        fleet=replace(config.fleet, min_devices=fleet, max_devices=max(fleet, config.fleet.max_devices)),
        round=replace(
            config.round,
            over_select=1.0,
            concurrency=None,
            buffer=None,
            max_staleness=None,
            fraction_connected=0.0,
            quorum=0.5,
            below_quorum="continue",
            evaluate_every=1,
            fraction_evaluate=1.0,
            deadline_s=max(MIN_DEADLINE_S, config.round.deadline_s),
        ),
        transfer=replace(config.transfer, block=BLOCK),
        bundle=BundleConfig(formats=()),
        web=WebConfig(),
        dashboard=DashboardConfig(),
        teach_newcomers=False,
        exit_when_done=True,
        keep_rounds=0,
        release=None,
        loggers="",
    )


def prepare_rounds(
    site: Installation, config: CoordinatorConfig, *, tiny: bool, tell: Callable[[str], None]
) -> RoundsCopy:
    """The store with which every round begins: the program of the model, compiled unless it is the `tiny` one."""
    summed = _is_summed(config)
    folder = site.folder / ("sums" if summed else "prepared")
    store = Store(folder)
    try:
        if tiny:
            tiny_program.put(store, tiny_program.PLAIN if summed else tiny_program.SCHEMA)
        key = open_signing_key(config.signing_key_folder)
        made = prepare_program(
            config, store, key, config.model.engines, progress=lambda part: tell(f"compiling {part}")
        )
        open_noise_key(folder)  # so that rounds of a method with noise can be compared
    finally:
        store.close()
    others = SUM_FLEET if summed else FLEET
    return RoundsCopy(site=site, config=config, program=made.program, prepared=folder, others=others)
