"""What one check found: a fact measured now, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    status: Status
    fact: str
    remedy: str = ""
    """What to do; empty if all is well."""


def ok(check: str, fact: str) -> Finding:
    """All is well."""
    return Finding(check=check, status="ok", fact=fact)


def warn(check: str, fact: str, remedy: str) -> Finding:
    """It works, but could be better, or could not be checked."""
    return Finding(check=check, status="warn", fact=fact, remedy=remedy)


def fail(check: str, fact: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check=check, status="fail", fact=fact, remedy=remedy)


def of_error(check: str, error: Exception) -> Finding:
    """What an error of ours says: its first line is the fact, the last one the remedy."""
    first, *rest = str(error).splitlines() or [""]
    return fail(check, first.rstrip(":"), " ".join(line.strip() for line in rest) or "Run it again with --debug.")


def line(finding: Finding) -> str:
    """One finding for people, in one line."""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.status:<4}  {finding.check:<10} {finding.fact}{remedy}"


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "ok": not any(finding.status == "fail" for finding in findings),
        "checks": [
            {"check": one.check, "status": one.status, "fact": one.fact, "remedy": one.remedy} for one in findings
        ],
    }
