"""A few cases of the fuzzer, the same each time; `make fuzz` draws for minutes."""

import json
import random

from tools.fuzz import change, fuzz, spoil


def test_bad_files_and_flags_end_in_one_sentence_and_leave_nothing():
    result = fuzz(seed=0, cases=8, seconds=None)
    assert result["cases"] == 8 and result["findings"] == []


def test_the_fuzzer_spoils_in_many_ways_and_the_same_for_a_seed(tmp_path):
    good = {"a": [1, {"b": "x"}], "c": None}
    done = []
    for attempt in range(2):
        draw = random.Random(5)
        kinds = []
        for number in range(60):
            path = tmp_path / f"{attempt}-{number}.json"
            path.write_text(json.dumps(good))
            kinds.append(spoil(path, draw))
        done.append(kinds)
    assert done[0] == done[1] and len({kind.split()[0] for kind in done[0]}) >= 8


def test_one_value_is_changed_and_named():
    for seed in range(50):
        value, what = change({"a": [1, 2], "b": {"c": 3}}, "key", random.Random(seed))
        assert "removed" in what or "whole file" in what
        assert value != {"a": [1, 2], "b": {"c": 3}}
