"""Text on its way to the demo models: split, tokenized, packed into rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from service.evaluation.documents import BUILT_IN, DEFAULT_DOCUMENT
from service.models.training import __main__ as cli
from service.models.training import corpus, shape
from service.models.training.tokenizer import EOS, load_tokenizer, save_tokenizer, special_ids, train_tokenizer
from tests.service.models.training.training_runs import HELDOUT, TINY, packed


@pytest.fixture(scope="module")
def stored(trained: Path) -> Any:
    """The tokenizer as a service loads it."""
    return AutoTokenizer.from_pretrained(trained / shape.BASE)


class TestTokenizer:
    @given(text=st.text())
    @example(text=" \r\n\t  two  spaces , don 't \u00a0\ufeff\x00")
    def test_decoding_gives_the_text_back(self, stored: Any, text: str) -> None:
        ids = stored(text)["input_ids"]
        assert ids[0] == stored.bos_token_id
        assert not {stored.bos_token_id, stored.eos_token_id} & set(ids[1:])
        assert stored.decode(ids, skip_special_tokens=True) == text
        assert stored.decode(stored(text, add_special_tokens=False)["input_ids"]) == text

    def test_special_tokens_can_be_spelled_out(self, stored: Any) -> None:
        """As with tokenizers of other models: lm-eval asks ``/tokenize`` for BOS by its text."""
        assert stored("<|bos|>", add_special_tokens=False)["input_ids"] == [stored.bos_token_id]
        assert stored("a<|eos|>")["input_ids"][-1] == stored.eos_token_id

    def test_size_is_as_asked_and_every_byte_is_in_it(self, run_dir: Path) -> None:
        tokenizer = load_tokenizer(run_dir / "tokenizer")
        assert 258 < tokenizer.get_vocab_size() <= TINY.vocab_size
        assert len(train_tokenizer(["aaaa bbbb"] * 9, 262).get_vocab()) == 262
        assert sum(len(token) == 1 for token in train_tokenizer([""], 300).get_vocab()) == 256

    def test_every_digit_is_a_token_alone(self) -> None:
        """A merge of a space and a digit makes some numbers begin unlike others: small models then miss passkeys."""
        trained = train_tokenizer(["a 1 of 10 in 1999, 1 to 11"] * 9, 300)
        for tokenizer in (trained, *(load_tokenizer(cli.DEMO / shape.served_name(kind)) for kind in shape.KINDS)):
            tokens = tokenizer.encode(" 12, 10 1", add_special_tokens=False).tokens
            assert tokens == ["Ġ", "1", "2", ",", "Ġ", "1", "0", "Ġ", "1"]

    def test_a_foreign_tokenizer_is_refused(self, tmp_path: Path) -> None:
        tokenizer = train_tokenizer(["words"], 260)
        save_tokenizer(tokenizer, tmp_path, 32)
        path = tmp_path / "tokenizer.json"
        path.write_text(path.read_text().replace(EOS, "<end>"))
        with pytest.raises(ValueError, match="the tokenizer has no"):
            special_ids(load_tokenizer(tmp_path))


class TestCorpus:
    def test_the_default_document_is_never_read(self, tmp_path: Path) -> None:
        for name in ("ast.py", "pydoc_data/topics.py", "test/test_ast.py", "site-packages/x/y.py", "json/decoder.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x = 1\n")
        assert [d.name for d in corpus.read_standard_library(tmp_path)] == ["ast.py", "json/decoder.py"]

    def test_the_default_document_in_a_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("words")
        (tmp_path / "b.txt").write_text(BUILT_IN[DEFAULT_DOCUMENT]())
        with pytest.raises(corpus.CorpusError, match=r"b\.txt is Persuasion"):
            corpus.read_folder(tmp_path, "CC0-1.0")

    def test_the_running_interpreter_gives_its_sources_without_the_default_document(self) -> None:
        documents = corpus.read_standard_library()
        assert {"ast.py", "json/decoder.py"} <= {document.name for document in documents}
        passage = topics["assert"][200:400]
        assert not any("pydoc_data" in document.name or passage in document.text for document in documents)

    def test_held_out_documents_are_not_in_the_training_tokens(self, run_dir: Path, stories: Path) -> None:
        tokenizer = load_tokenizer(run_dir / "tokenizer")
        text = {
            name: tokenizer.decode(np.fromfile(run_dir / name, np.uint16).tolist(), skip_special_tokens=False)
            for name in ("train.bin", "heldout.bin")
        }
        kept = [path for path in sorted(stories.glob("*.txt")) if path.name != HELDOUT]
        assert text["heldout.bin"] == (stories / HELDOUT).read_text() + EOS
        assert text["train.bin"] == "".join(path.read_text() + EOS for path in kept)
        assert "number3marker" not in text["train.bin"]

    def test_the_tokenizer_learns_nothing_from_held_out_documents(self, tmp_path: Path) -> None:
        for name, text in (("a.txt", "plain words here "), ("b.txt", "zyxzyxzyx ")):
            (tmp_path / name).write_text(text * 50)
        documents = corpus.read_folder(tmp_path, "CC0-1.0")
        learned = train_tokenizer(corpus.training_texts(documents, {"b.txt"}), 300).get_vocab()
        assert not any("zy" in token for token in learned)
        assert any("words" in token for token in learned)

    @given(st.lists(st.text("abc", min_size=1), min_size=2, unique=True), st.floats(0, 0.9), st.integers(0, 9))
    def test_split_is_seeded_and_leaves_both_sides_something(self, names: list[str], share: float, seed: int) -> None:
        try:
            held = corpus.heldout_names(names, [], share, seed)
        except corpus.CorpusError:
            assert round(share * len(names)) == len(names)
            return
        assert held == corpus.heldout_names(names[::-1], [], share, seed)
        assert len(held) == max(1, round(share * len(names)))
        assert set() < held < set(names)

    def test_what_cannot_be_split_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(corpus.CorpusError, match=r"b\.txt"):
            corpus.heldout_names(["a.txt"], ["b.txt"], 0.1, 0)
        with pytest.raises(corpus.CorpusError, match="nothing is left"):
            corpus.heldout_names(["a.txt"], [], 0.1, 0)
        with pytest.raises(corpus.CorpusError, match="no text files"):
            corpus.read_folder(tmp_path, "CC0-1.0")

    def test_packing_is_kept_until_a_document_changes(self, stories: Path, tmp_path: Path) -> None:
        documents = corpus.read_folder(stories, "CC0-1.0")
        tokenizer = train_tokenizer((document.text for document in documents), 300)
        first = corpus.pack(documents, {HELDOUT}, tokenizer, tmp_path)
        packed_at = (tmp_path / "train.bin").stat().st_mtime_ns
        assert corpus.pack(documents, {HELDOUT}, tokenizer, tmp_path) == first
        assert (tmp_path / "train.bin").stat().st_mtime_ns == packed_at
        changed = [replace(documents[0], text=documents[0].text + "More."), *documents[1:]]
        assert corpus.pack(changed, {HELDOUT}, tokenizer, tmp_path)[0].tokens > first[0].tokens

    def test_rows_start_with_bos_and_predict_every_token_once(self, run_dir: Path) -> None:
        data = packed(run_dir, "train.bin")
        inputs, targets = data.rows(np.arange(len(data)))
        assert inputs.shape == targets.shape == (len(data), TINY.context)
        assert (inputs[:, 0] == data.bos_token_id).all()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert targets.flatten().tolist() == data.ids[: len(data) * TINY.context].tolist()

    @given(rows=st.integers(1, 40), batch=st.integers(1, 9), seed=st.integers(0, 3))
    def test_every_pass_is_another_permutation(self, rows: int, batch: int, seed: int) -> None:
        order = np.concatenate([corpus.batch_order(rows, batch, step, seed) for step in range(2 * rows)])
        first, second = order[:rows], order[rows : 2 * rows]
        assert sorted(first) == sorted(second) == list(range(rows))
        assert rows < 20 or first.tolist() != second.tolist()
