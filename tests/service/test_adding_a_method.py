"""A method is a file and a line. A toy one reaches the API, batches, every ``base``, `recommend` and the shell."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import pytest
import torch

from patches import METHODS, RopeGeometry, patched
from patches.encoding.bands import Band
from patches.encoding.method import BasedMethod
from patches.encoding.recipe import Recipe
from patches.methods.frequencies.default import Default
from patches.registry import check_described
from tests.conftest import ROOT
from tests.forks.command import ropeway
from tests.forks.process import forked
from tests.models import tiny_model
from tests.service.conftest import TEXT
from tests.service.serving import serving_sources

TOY = Path(__file__).parent / "root_stretched.py"
LAST_LINE = '    "custom": Custom,\n'
LINE = '    "root_stretched": RootStretched,\n'
NEXT = "from patches.methods.none"
IMPORT = "from patches.methods.frequencies.root_stretched import RootStretched\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with one more file and one more line; every other file is a link to the real one."""
    root = tmp_path_factory.mktemp("tree")
    patches, real = root / "patches", ROOT / "patches"
    shutil.copytree(real / "methods", patches / "methods", copy_function=lambda file, to: Path(to).symlink_to(file))
    for path in real.iterdir():
        if path.name not in ("methods", "registry.py", "__pycache__"):
            (patches / path.name).symlink_to(path)
    shutil.copy(TOY, patches / "methods" / "frequencies")
    registry = (real / "registry.py").read_text(encoding="utf-8")
    assert registry.count(LAST_LINE) == 1
    registry = registry.replace(LAST_LINE, LAST_LINE + LINE).replace(NEXT, IMPORT + NEXT)
    (patches / "registry.py").write_text(registry)
    (root / "service").symlink_to(ROOT / "service")
    return root


@pytest.fixture(scope="module")
def server(tree: Path, checkpoints: Path) -> Iterator[str]:
    with serving_sources(tree, checkpoints / "tiny") as url:
        yield url


def test_the_api_computes_it_in_every_place(server: str) -> None:
    """Divisor sqrt(4) is that of ``linear`` with 2, in a mixed batch, in curves and under a position map."""
    by_group = {"method": "self_extend", "group_size": 4, "neighbor_window": 16}
    pe = [
        {"method": "root_stretched", "factor": 4},
        {**by_group, "base": {"method": "root_stretched", "factor": 4}},
        {"method": "linear", "factor": 2},
        {**by_group, "base": {"method": "linear", "factor": 2}},
    ]
    answer = httpx.post(f"{server}/generate", json={"prompt": TEXT[:400], "pe": pe, "max_new_tokens": 8}, timeout=180)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    tokens = [result["token_ids"] for result in results]
    assert tokens[:2] == tokens[2:]
    assert results[0]["pe"]["method"] == "root_stretched"
    body = {"input": TEXT, "methods": pe, "lengths": [64, 128]}
    methods = httpx.post(f"{server}/perplexity", json=body, timeout=180).json()["methods"]
    curves = [[at["perplexity"] for at in method["lengths"]] for method in methods]
    assert curves[:2] == curves[2:]
    refused = httpx.post(f"{server}/generate", json={"prompt": TEXT, "pe": "root_stretched"}, timeout=180)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pe.factor")


def test_the_api_describes_and_proposes_it(server: str) -> None:
    about = httpx.get(f"{server}/methods/root_stretched", timeout=180).json()
    assert about["parameters"]["properties"]["factor"]["description"] == "The square of the divisor."
    picture = httpx.get(f"{server}/methods/root_stretched/frequencies.png?factor=4", timeout=180)
    assert picture.content.startswith(b"\x89PNG")
    plan = httpx.post(f"{server}/recommend", json={"input": TEXT, "length": 128}, timeout=180).json()
    assert "root_stretched" in {method["pe"]["method"] for method in plan["methods"]}


def test_the_shell_lists_it(tree: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(ropeway, str(tree), "methods", "root_stretched", log=log, folder=tree).wait(180) == 0
    assert "Squeezes positions by the square root of the factor." in log.read_text(encoding="utf-8")


class Bare(BasedMethod):
    """Step 1 alone, with a map that the attention has no row for."""

    method: Literal["bare"] = "bare"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return self.on_base(geometry, Band(Halved(), Halved()))


@dataclass(frozen=True)
class Halved:
    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position.double() / 2


def test_a_method_without_its_description_is_named() -> None:
    """Every listing of all methods failed, and named no method."""
    with pytest.raises(TypeError, match=r"^Bare: needs `summary`, `use`, .*`formula`; patches/encoding/method.py"):
        check_described({"bare": Bare})


class Demanding(Bare):
    factor: float
    k: float


def test_a_required_parameter_without_an_example_is_named() -> None:
    """The documentation ended with "k: required", and named no method."""
    with pytest.raises(TypeError, match=r"^Demanding: needs an `example` with `k`"):
        Demanding.example(RopeGeometry(64, 64, 1e4, 256, 256, num_attention_heads=4), 4.0)


def test_a_map_that_the_attention_lacks_is_refused_at_the_door() -> None:
    """It failed in a step, and the engine started again."""
    Bare.model_rebuild(_types_namespace={"FrequencyEncoding": Default})  # as patches/parsing.py does for METHODS
    with patched(tiny_model("llama")[1]) as patch, pytest.raises(ValueError, match=r"^method: bare: .*Halved.*\.py"):
        patch.resolve(Bare(), 64)


def test_the_toy_is_in_no_registry_of_ours() -> None:
    assert "root_stretched" not in METHODS
