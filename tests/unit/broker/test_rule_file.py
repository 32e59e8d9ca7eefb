"""What a controller decided outlives brokers' restarts."""

from __future__ import annotations

from pathlib import Path

from nearcast.broker.rule_file import NAME, RuleFile
from nearcast.fabric.control import ClassRule, ClassRules
from nearcast.fabricconfig import ReplicaSet

RULES = ClassRules(7, (ClassRule("a/#", "set:eu"),), (ReplicaSet(name="eu", members=("b1", "b2", "b3")),))


def test_rules_are_there_after_a_restart(tmp_path: Path) -> None:
    RuleFile(tmp_path).save(RULES)
    assert RuleFile(tmp_path).load() == RULES


def test_older_rules_do_not_replace_newer_ones(tmp_path: Path) -> None:
    file = RuleFile(tmp_path)
    file.save(RULES)
    file.save(ClassRules(6))
    assert RuleFile(tmp_path).load() == RULES


def test_a_file_that_makes_no_sense_is_no_rules(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xc1nonsense")
    assert RuleFile(tmp_path).load() is None
    assert RuleFile(tmp_path / "other").load() is None
