"""axe-core on the phone's page and on the dashboard, light and dark: what it passes and what it finds.

    npm pack axe-core@4.14.1 && tar -xzf axe-core-4.14.1.tgz
    python -m tests.figures.accessibility package/axe.min.js [--shots FOLDER]

A page has no finding where every rule of WCAG 2.2 (A, AA) and axe's best practices passes. Exit code 1 with a finding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import expect, sync_playwright

from tests.coordinator.dashboard.test_displayed_metrics import EXCHANGE, joined, round_event, seen
from tests.support.browser import DESKTOP, FLAGS, PHONE, find_chromium
from tests.support.phone_federation import known_model
from tests.support.phone_page import served
from tests.support.served_dashboard import serve_dashboard

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def findings(page: Page, axe: str, name: str) -> int:
    """Run axe, and write a line for the page and one for each finding; -> how many there are."""
    page.evaluate(axe)
    told: dict[str, Any] = page.evaluate("axe.run()")
    counts = {kind: len(told[kind]) for kind in ("passes", "violations", "incomplete")}
    sys.stdout.write(
        f"{name}: {counts['passes']} rules pass, {counts['violations']} fail, {counts['incomplete']} open\n"
    )
    for kind in ("violations", "incomplete"):
        for rule in told[kind]:
            where = "; ".join(str(node["target"]) for node in rule["nodes"][:4])
            sys.stdout.write(f"  {kind}: {rule['id']} ({rule['impact']}): {rule['help']}: {where}\n")
    return counts["violations"]


def phone_pages(browser: Browser, axe: str, folder: Path, shots: Path | None) -> int:
    """The page with its model known, in each tab, online and opened without a coordinator."""
    found = 0
    with served(known_model(folder)) as url:
        page = browser.new_page(viewport={"width": PHONE[0], "height": PHONE[1]})
        page.goto(url)
        page.wait_for_selector("#entry:not([hidden])")
        page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for tab in ("draw", "photos", "table"):
                page.evaluate(f"document.querySelector('[data-tab={tab}]').click()")
                found += findings(page, axe, f"phone, {tab}, {scheme}")
            if shots:
                page.screenshot(path=shots / f"phone-{scheme}.png", full_page=True)
    page.reload()
    page.wait_for_selector("#offline:not([hidden])")
    found += findings(page, axe, "phone, opened without its coordinator")
    if shots:
        page.screenshot(path=shots / "phone-offline.png", full_page=True)
    return found


def dashboard_pages(browser: Browser, axe: str, folder: Path, shots: Path | None) -> int:
    """The dashboard of a small run."""
    found = 0
    with serve_dashboard(folder) as site:
        for number in range(4):
            site.hub.event(joined(number))
        site.hub.event({**round_event(1, [0, 0, 1, 1]), "loss_per_center": [1.0, 0.5, None]})
        site.hub.status(seen(exchange=EXCHANGE, presence=dict.fromkeys(("d0", "d1", "d2", "d3"), "on")))
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]}, color_scheme=scheme)
            page.goto(site.link)
            expect(page.locator("#phase")).to_have_text("running", timeout=60_000)
            found += findings(page, axe, f"dashboard, {scheme}")
            if shots:
                page.screenshot(path=shots / f"dashboard-{scheme}.png", full_page=True)
            page.close()
    return found


def main() -> int:
    """Both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axe", type=Path)
    parser.add_argument("--shots", type=Path, default=None)
    options = parser.parse_args()
    source = options.axe.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=list(FLAGS))
        found = 0
        for look in (phone_pages, dashboard_pages):
            place = Path(folder) / look.__name__
            place.mkdir()
            found += look(browser, source, place, options.shots)
        browser.close()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
