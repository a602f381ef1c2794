"""Names of split models."""

from __future__ import annotations

from cellama.engine.system.split_files import is_first_part, part_names


def test_any_part_of_a_split_file_yields_the_names_of_all_parts() -> None:
    names = ["a-00001-of-00003.gguf", "a-00002-of-00003.gguf", "a-00003-of-00003.gguf"]
    assert [part_names(name) for name in names] == [names] * 3
    assert [is_first_part(name) for name in names] == [True, False, False]


def test_unsplit_file_has_one_part() -> None:
    for name in ("a.gguf", "a-1-of-2.gguf", "a-00001-of-00002.bin"):
        assert part_names(name) == [name]
        assert is_first_part(name)
