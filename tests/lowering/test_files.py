import os
import sys

import pytest

from precede.lowering.errors import BundleError
from precede.lowering.files import (
    appearing,
    checked_path,
    copy_synced,
    sha256_file,
    sha256_head,
    sha256_sample,
    write_synced,
)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a\\b", ".", "..", "a/", "a\0b"])
def test_refuses_names(tmp_path, name):
    with pytest.raises(BundleError, match="is not allowed"):
        checked_path(tmp_path, name)


def test_accepts_names_inside(tmp_path):
    assert checked_path(tmp_path, "parts/main.json") == tmp_path / "parts" / "main.json"


def test_refuses_links_out(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("x")
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    for name in ("file", "folder/secret"):
        with pytest.raises(BundleError, match="outside the engine folder"):
            checked_path(root, name)


def test_refuses_a_link_to_itself(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    if sys.version_info < (3, 13):
        with pytest.raises(BundleError, match="leads nowhere"):
            checked_path(tmp_path, "loop")


def test_header_digest_ignores_data(tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    header = (2).to_bytes(8, "little") + b"{}"
    first.write_bytes(header + b"data")
    second.write_bytes(header + b"else")
    assert sha256_head(first) == sha256_head(second)
    assert sha256_file(first) != sha256_file(second)


def test_header_digest_of_short_file(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"abc")
    assert len(sha256_head(file)) == 64


def test_sample_covers_small_files_and_both_ends_of_large_ones(tmp_path):
    file = tmp_path / "a"
    for size in (0, 1, 100_000, 4 << 20):
        seen = set()
        for at in (None, 0, size // 3, size - 1):
            data = bytearray(size)
            if at is not None and size:
                data[at] = 1
            file.write_bytes(data)
            seen.add(sha256_sample(file))
        assert len(seen) == len({None, 0, size // 3, size - 1} if size else {None})
    with file.open("wb") as out:
        out.truncate(1 << 30)
    empty = sha256_sample(file)
    for at in (0, (1 << 30) - 1):
        with file.open("r+b") as out:
            out.seek(at)
            out.write(b"x")
        assert sha256_sample(file) != empty
        empty = sha256_sample(file)


def test_unreadable_source_is_named(tmp_path):
    with pytest.raises(BundleError, match=r"gone: cannot be read: No such file"):
        sha256_sample(tmp_path / "gone")
    with pytest.raises(BundleError, match=r"gone: cannot be read: No such file"), appearing(tmp_path / "out") as folder:
        copy_synced(tmp_path / "gone", folder / "copy")


def test_appears_whole(tmp_path):
    target = tmp_path / "out"
    with appearing(target) as folder:
        write_synced(folder / "sub" / "file", "new")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_vanishes_on_error(tmp_path, error):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")

    def interrupted():
        with appearing(target) as folder:
            write_synced(folder / "new", "new")
            raise error

    with pytest.raises(error):
        interrupted()
    assert (target / "old").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_old_one_returns_if_the_exchange_fails(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    rename = type(target).rename

    def broken(self, other):
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, other)

    monkeypatch.setattr(type(target), "rename", broken)
    with pytest.raises(KeyboardInterrupt), appearing(target) as folder:
        write_synced(folder / "new", "new")
    assert (target / "old").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]
