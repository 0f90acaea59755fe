"""Policy files: read strictly, given to the model with the same hash, and refused with both hashes otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from patches import Method, parse
from service.models import policies
from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import load
from service.models.policies import assign_policies, check_policy, check_ranges
from service.models.registry import ModelRegistry
from service.policy.auto import Range
from service.policy.policy import InvalidPolicy, Policy, parse_policy, read_policies
from service.settings import Settings
from tests.service.conftest import tiny_checkpoint


@pytest.fixture(scope="module")
def registry(checkpoints: Path) -> Iterator[ModelRegistry]:
    models = ModelRegistry(Settings(_env_file=None, model=str(checkpoints), cache_tokens=256))
    yield models
    models.close()


@pytest.fixture
def models(registry: ModelRegistry) -> Iterator[ModelRegistry]:
    """The served models, without policies before and after."""
    yield registry
    for served in registry:
        served.policy = None


def write(folder: Path, name: str, fields: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(fields))
    return file


def test_a_file_comes_back_as_it_was(policy: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", policy)
    (read,) = read_policies(file).values()
    assert json.loads(read.model_dump_json()) == policy | {"notes": []}
    assert hash(read.auto("file").ranges) == hash(read.ranges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: must be 1, not 2"),
        ({"fingerprint": "x"}, "fingerprint: "),
        ({"trained_length": "64"}, "trained_length: must be a whole number"),
        ({"trained_len": 64}, "trained_len: unknown field: did you mean trained_length?"),
        ({"ranges": []}, "ranges: needs at least 1 entry"),
        ({"ranges": [{"pe": "yarn:4"}]}, "ranges.0.up_to: required"),
        ({"ranges": [{"up_to": 0, "pe": "yarn:4"}]}, "ranges.0.up_to: must be at least 1, not 0"),
        ({"ranges": [{"up_to": None, "pe": "yarm"}]}, "ranges.0.pe: unknown method 'yarm': did you mean yarn?"),
        ({"ranges": [{"up_to": None, "pe": "auto"}]}, "ranges.0.pe: unknown method 'auto'"),
        ({"calibration": {"id": None}}, "calibration.created: required"),
        ({"calibration": {"created": "2026-11-22T10:00:00"}}, "calibration.created: "),
    ],
)
def test_a_wrong_field_is_refused_by_name(policy: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        parse_policy(policy | change)
    assert str(refused.value).startswith(message)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert read_policies(None) == {}
    with pytest.raises(InvalidPolicy, match=r"ROPEWAY_POLICY: the folder .* has no"):
        read_policies(tmp_path)
    with pytest.raises(InvalidPolicy, match=r"ROPEWAY_POLICY: .*nowhere\.json: .*No such file"):
        read_policies(tmp_path / "nowhere.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InvalidPolicy, match=r"a\.json: "):
        read_policies(tmp_path)


def test_a_model_gets_the_policy_of_its_hash(models: ModelRegistry, policy: dict[str, Any], tmp_path: Path) -> None:
    assign_policies(read_policies(write(tmp_path, "a.json", policy | {"model": "other-name"})), models)
    tiny, variant = models
    assert tiny.policy is not None
    assert variant.policy is None


def test_a_folder_may_have_policies_of_other_models(
    models: ModelRegistry, policy: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, "a.json", policy)
    write(tmp_path, "b.json", policy | {"model": "elsewhere", "fingerprint": "0" * 64})
    assign_policies(read_policies(tmp_path), models)
    assert [served.policy is not None for served in models] == [True, False]
    write(tmp_path, "c.json", policy)
    models.default.policy = None
    with pytest.raises(InvalidPolicy, match=r"c\.json: 'tiny' has a policy from another file already"):
        assign_policies(read_policies(tmp_path), models)


def test_a_policy_of_a_served_name_and_other_weights_is_refused(
    models: ModelRegistry, policy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside the policies of other models, which are passed over with a warning."""
    warnings: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(
        policies.log, "warning", lambda event, **fields: warnings.append((event, fields)), raising=False
    )
    write(tmp_path, "a.json", policy)
    write(tmp_path, "b.json", policy | {"model": "elsewhere", "fingerprint": "0" * 64})
    assign_policies(read_policies(tmp_path), models)
    assert warnings == [("policy_unused", {"file": str(tmp_path / "b.json"), "model": "elsewhere"})]
    models.default.policy = None
    write(tmp_path, "b.json", policy | {"model": "tiny-alibi", "fingerprint": "0" * 64})
    with pytest.raises(InvalidPolicy, match=r"b\.json: fingerprint: .* and 'tiny-alibi' has"):
        assign_policies(read_policies(tmp_path), models)


@pytest.mark.parametrize(
    ("ends", "refused"),
    [
        ((64, 128, 256), None),
        ((64, 129, 256), "1.pe: no 129"),
        ((63, 128, 256), "1.pe: no 64"),
        ((64, None), None),
        ((63, None), "1.pe: no 64"),
        ((128, 256), "1.pe: no 129"),
    ],
)
def test_an_encoding_must_fit_at_both_ends_of_its_range(
    models: ModelRegistry, monkeypatch: pytest.MonkeyPatch, ends: tuple[int | None, ...], refused: str | None
) -> None:
    """The second one fits lengths from 65 to 128, the others fit those up to 256. Requests end at 100 tokens."""

    def resolve(method: Method, length: int) -> None:
        if length not in fitting[method.method]:
            raise ValueError(f"no {length}")

    fitting = {"default": range(1, 257), "yarn": range(65, 129)}
    monkeypatch.setattr(models.default.patch, "resolve", resolve)
    monkeypatch.setattr(models.default, "max_length", 100)
    names = zip(ends, ("default", "yarn:4", "default"), strict=False)
    ranges = tuple(Range(up_to=end, pe=parse(name)) for end, name in names)
    with nullcontext() if refused is None else pytest.raises(InvalidPolicy, match=rf"^ranges\.{refused}$"):
        check_ranges(ranges, models.default, models)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint: the policy is for the model 'tiny' with 000"),
        ({"fingerprint": "0" * 64, "model": "elsewhere"}, "and 'tiny' has "),
        ({"trained_length": 128}, "trained_length: 128 in the policy, 64 for 'tiny'"),
        ({"ranges": [{"up_to": None, "pe": "learned"}]}, "ranges.0.pe: method: learned is for models"),
        (
            {"ranges": [{"up_to": None, "pe": "alibi"}]},
            "ranges.0.pe: 'tiny-alibi' answers under alibi: add use_variant false",
        ),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(
    models: ModelRegistry, policy: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        assign_policies(read_policies(write(tmp_path, "a.json", policy | change)), models)
    assert message in str(refused.value)
    if "fingerprint" in change:
        assert models.default.contents in str(refused.value), "both hashes are named"
        assert change["fingerprint"] in str(refused.value)


def test_policies_of_other_models_only_are_refused(
    models: ModelRegistry, policy: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write(tmp_path, f"{name}.json", policy | {"model": name, "fingerprint": "0" * 64})
    with pytest.raises(InvalidPolicy, match="none of the 2 policies is for a served model"):
        assign_policies(read_policies(tmp_path), models)


def test_the_hash_of_contents_is_the_same_with_other_threads_and_in_another_folder(
    fingerprint: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", position_encoding_variants={"alibi": "tiny-alibi"})
    copy = shutil.copytree(folder, tmp_path / "copy")
    model: Any = load("copy", copy, Settings(_env_file=None)).model
    threads = torch.get_num_threads()
    found = set()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.add(contents(model))
    finally:
        torch.set_num_threads(threads)
    model.model.rotary_emb.inv_freq.mul_(1 + 1e-7)
    assert found == {contents(model)} == {fingerprint}, "the frequencies follow from the configuration"


def test_a_calibration_makes_a_policy_that_a_file_holds(
    models: ModelRegistry, policy: dict[str, Any], tmp_path: Path
) -> None:
    made = parse_policy(policy)
    check_policy(made, models.default, models)
    assert json.loads(made.model_dump_json()) == policy | {"notes": []}
    assign_policies(read_policies(write(tmp_path, "a.json", made.model_dump(mode="json"))), models)
    assert models.default.policy == made
    with pytest.raises(InvalidPolicy, match="range 1 must have up_to above 64"):
        parse_policy(policy | {"ranges": [policy["ranges"][0]] * 2})
    with pytest.raises(InvalidPolicy, match=r"ranges\.0\.pe: 'tiny-alibi' answers under alibi"):
        check_policy(parse_policy(policy | {"ranges": [{"up_to": 64, "pe": "alibi"}]}), models.default, models)


def test_a_policy_is_a_value(policy: dict[str, Any]) -> None:
    read = Policy.model_validate(policy)
    with pytest.raises(ValueError, match="frozen"):
        read.trained_length = 1  # type: ignore[misc]
