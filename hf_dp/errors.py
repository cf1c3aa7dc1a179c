"""One tree of errors. Every one is a refusal with a way out: what was found, why it matters, what to do."""

from __future__ import annotations

from typing import ClassVar

_LONGEST = 1500  # characters
_MOST_LINES = 20
_CUT = " [...] "


def shortened(text: str, longest: int = _LONGEST, most_lines: int = _MOST_LINES) -> str:
    """Text that quotes what others wrote, to be printed: at most `longest` characters, and none that no screen shows.

    Lone surrogates cannot be written, and control characters could move the cursor over what was said before.
    """
    # First: what is not printable takes more room when it is escaped.
    text = text if len(text) <= longest else text[:longest] + text[-longest:]
    # Nearly all is, and refusals are made for each use of a weight that may be one.
    is_shown = text.replace("\n", "").replace("\t", "").isprintable()
    shown = text if is_shown else "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    lines = shown.split("\n")
    if len(lines) > most_lines:
        shown = "\n".join([*lines[: most_lines // 2], _CUT, *lines[-(most_lines // 2) :]])
    if len(shown) <= longest:
        return shown
    half = (longest - len(_CUT)) // 2
    return shown[:half] + _CUT + shown[-half:]


class HfDpError(Exception):
    """Base of every error that hf_dp raises on purpose.

    Args:
        found: what was found, with the name and the value of the offending thing.
        why: why going on would break the privacy promise (or the computation).
        fix: what the user can do about it.

    Attributes:
        longest: the most characters of each of these, and of lines: together a dozen lines of 100 characters.
    """

    longest: ClassVar[tuple[tuple[int, int], ...]] = ((480, 4), (260, 2), (420, 4))

    def __init__(self, found: str, *, why: str, fix: str) -> None:
        parts = zip((found, why, fix), self.longest, strict=True)
        self.found, self.why, self.fix = (shortened(text, most, lines) for text, (most, lines) in parts)
        super().__init__(f"{self.found}\n  Why this is refused: {self.why}\n  What to do: {self.fix}")

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


def damaged(
    kind: str,
    what: str,
    why: str = "what is not whole promises nothing.",
    fix: str = "take the file again from the folder that the private run saved; do not edit it by hand.",
) -> LedgerError:
    """What is read is not what was written: `what` is wrong with what should be a `kind`."""
    return LedgerError(f"this is {kind}: {what.removesuffix('.')}.", why=why, fix=fix)


class HubError(HfDpError):
    """A repository on the hub that cannot be read: no such name, no access, no network."""


class RanksError(HfDpError):
    """Another rank of the run has failed or ended, where this one waited for it; with that one's message."""

    longest = ((1300, 15), *HfDpError.longest[1:])
