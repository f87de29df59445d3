"""Which text is collected, and which of it is held out."""

import subprocess
import sys
from pathlib import Path

from bench.factory.corpus import collect
from bench.factory.dialogues import dialogues
from bench.factory.sources import Package, SourceRoot, standard_library
from services.held_out import held_out_texts, is_held_out


def _root(directory: Path, licence: str = "MIT") -> SourceRoot:
    package = Package("example", "1.0", licence)
    return SourceRoot(directory, frozenset({".py"}), frozenset(), {}, package)


def test_what_is_held_out_stays_held_out() -> None:
    """The bundled models were not trained on these files."""
    assert is_held_out("asyncio/base_subprocess.py")
    assert not is_held_out("json/decoder.py")


def test_the_same_files_give_the_same_corpus_wherever_they_lie(library: Path) -> None:
    first = collect([_root(library)], 10**6)
    moved = library.rename(library.with_name("elsewhere"))
    second = collect([_root(moved)], 10**6)
    assert first == second
    assert len(first.train) + len(first.held_out) == 2 * 200


def test_held_out_texts_are_not_trained_on_even_as_copies(library: Path) -> None:
    held_out = next(path for path in library.rglob("*.py") if is_held_out(_name(library, path)))
    copies = (library / f"copies/copy{index}.py" for index in range(100))
    copy = next(path for path in copies if not is_held_out(_name(library, path)))
    copy.parent.mkdir()
    copy.write_text(held_out.read_text())
    corpus = collect([_root(library)], 10**6)
    trained = {document.text for document in corpus.train}
    assert corpus.held_out
    assert trained.isdisjoint(document.text for document in corpus.held_out)


def test_no_package_exceeds_its_limit(library: Path) -> None:
    corpus = collect([_root(library)], 1000)
    for package in ("alpha", "beta"):
        texts = [d.text for d in corpus.train if d.path.startswith(package)]
        assert 0 < sum(map(len, texts)) <= 1000


def test_text_that_nobody_wrote_is_skipped(library: Path) -> None:
    before = collect([_root(library)], 10**6)
    (library / "long_lines.py").write_text("x = 1;" * 100)
    (library / "latin1.py").write_bytes(b"# caf\xe9\n")
    (library / "huge.py").write_text("x = 1\n" * 100_000)
    (library / "empty.py").write_text("\n")
    vendored = library / "alpha" / "_vendor" / "other.py"
    vendored.parent.mkdir()
    vendored.write_text("y = 2\n")
    assert collect([_root(library)], 10**6) == before


def test_proprietary_packages_are_left_out(library: Path) -> None:
    corpus = collect([_root(library, "Other/Proprietary License")], 10**6)
    assert not corpus.train
    assert not corpus.held_out


def test_the_standard_library_holds_out_a_fixed_small_part() -> None:
    paths = standard_library().relative_paths()
    texts = held_out_texts()
    assert {text.path for text in texts} <= {path for path in paths if is_held_out(path)}
    assert 1 / 80 < len(texts) / len(paths) < 1 / 20
    assert texts == held_out_texts()


def test_held_out_texts_need_no_torch() -> None:
    program = "import sys, services.held_out; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_dialogue_asks_with_the_docstring_and_answers_with_the_source(library: Path) -> None:
    documents = collect([_root(library)], 10**6).train
    made = dialogues(documents, 10**6)
    assert len(made) == len(documents)
    source = next(d.text for d in documents if d.path == made[0].path)
    assert made[0].is_dialogue
    assert made[0].text.startswith("<|im_start|>user\nWrite a Python function `function")
    assert made[0].text.endswith(f"<|im_start|>assistant\n{source.strip()}<|im_end|>\n")


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()
