"""One tree of errors. Every one is a refusal with a way out: what was found, why it matters, what to do."""

from __future__ import annotations


class HfDpError(Exception):
    """Base of every error that hf_dp raises on purpose.

    Args:
        found: what was found, with the name and the value of the offending thing.
        why: why going on would break the privacy promise (or the computation).
        fix: what the user can do about it.
    """

    def __init__(self, found: str, *, why: str, fix: str) -> None:
        self.found, self.why, self.fix = found, why, fix
        super().__init__(f"{found}\n  Why this is refused: {why}\n  What to do: {fix}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild, (type(self), self.found, self.why, self.fix)


def _rebuild(kind: type[HfDpError], found: str, why: str, fix: str) -> HfDpError:
    return kind(found, why=why, fix=fix)


class ConfigurationError(HfDpError, ValueError):
    """A value in `PrivacyConfig`, `TrainingArguments` or the data that cannot be trained with privately."""


class UnsupportedModelError(HfDpError):
    """A model, or an operation in it, whose per-example gradients are not known to be exact."""


class PreflightError(UnsupportedModelError):
    """The check before the first step found per-example gradients that are wrong, or examples that mix."""


class UnseenUseError(PreflightError):
    """A parameter is used in a way that the check before the first step did not see."""


class BudgetExceededError(HfDpError):
    """The next private release would cost more than the promised budget."""


class LedgerError(HfDpError):
    """A privacy ledger that is missing, damaged, or belongs to another run."""


class HubError(HfDpError):
    """A repository on the hub that cannot be read: no such name, no access, no network."""
