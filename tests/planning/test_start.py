"""What `hf-dp plan` says to start from is what docs/choosing.md says."""

import math
import re
from pathlib import Path

import pytest

from hf_dp.planning.start import RULES, start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"


def test_the_page_quotes_the_rules():
    rows = re.search(r"<!-- rules begin.*?-->\n\n(.*?)\n\n<!-- rules end", PAGE.read_text(encoding="utf-8"), re.S)
    assert rows is not None
    quoted = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows[1].splitlines()]
    assert quoted[2:] == [(rule.setting, rule.start, rule.why) for rule in RULES]


def test_no_rule_is_followed_by_a_look_at_private_data():
    told = {one["setting"]: one["start"] for one in start(64, 10, 0.1)}
    assert "unless public data shows clipping" in told["clipping norm"]
    assert all("public data" in rule.start for rule in RULES if "clipped" in rule.start)


def test_a_rate_that_noise_carries_as_far_in_many_steps_as_in_few():
    rates = {steps: float(start(64, steps, 0.1)[-1]["start"].split(",")[0]) for steps in (10, 40, 90)}
    assert rates[10] == 7e-3
    for steps, rate in rates.items():
        assert rate * math.sqrt(steps) == pytest.approx(rates[10] * math.sqrt(10), rel=0.05)
