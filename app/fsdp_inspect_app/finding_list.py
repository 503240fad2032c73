"""List findings with a link to the page that shows the evidence."""

from collections.abc import Sequence

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.result_types import Finding, Limit, PlanCheck, Verdict
from fsdp_inspect_app.cards import show_text
from fsdp_inspect_app.pages import find_page
from fsdp_inspect_app.selection import page_link
from fsdp_inspect_app.wording import plain

_PAGE_OF_RULE = {
    "R32": "ranks",
    "R21": "memory",
    **dict.fromkeys(("R7", "R12", "R19", "R20", "R31", "R33"), "timeline"),
    **dict.fromkeys(("R1", "R14", "R23", "R26", "R27", "R30"), "units"),
}
_PAGE_OF_LIMIT = {
    Limit.MEMORY: "memory",
    Limit.MEMORY_CREEP: "memory",
    Limit.STRAGGLER: "ranks",
    Limit.SLOW_GROUP: "ranks",
}


def page_of_limit(verdict: Verdict) -> str:
    """The page with the details of the limit of the step."""
    return _PAGE_OF_LIMIT.get(verdict.limit, "timeline")


def show_findings(
    findings: Sequence[Finding], verdict: Verdict, plan_check: PlanCheck | None
) -> None:
    """Show each finding in one line, with a link to its evidence."""
    for finding in findings:
        _show_line(finding.sentence, _page_of(finding, verdict), finding.units)
    if plan_check is not None and plan_check.is_consistent is not False:
        _show_line(plan_check.sentence, "units", ())
    if not findings:
        show_text(plain("No finding. Advice lists changes of the plan."))
    page_link("advice", "Open Advice", icon=":material/lightbulb:")


def _page_of(finding: Finding, verdict: Verdict) -> str:
    if finding.rule in _PAGE_OF_RULE:
        return _PAGE_OF_RULE[finding.rule]
    if finding.units:
        return "units"
    return page_of_limit(verdict)


def _show_line(sentence: str, page: str, units: Sequence[str]) -> None:
    show_text(plain(sentence))
    named = {"unit": format_unit(units[0])} if len(units) == 1 else {"unit": None}
    file = find_page(page)
    page_link(page, f"Show in {file.title}", icon=file.icon, **named)
