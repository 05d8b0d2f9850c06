"""What reaches a terminal, and what does not."""

import sys

from precede.terminal import complain, console, make_streams_safe, printable, progress_bar


def test_printable_keeps_text_and_disarms_controls():
    assert printable("é🙂 a\n\tb") == "é🙂 a\n\tb"
    assert printable("\x1b[2J\x00\x9b\u202e") == "\\x1b[2J\\x00\\x9b\\u202e"


def test_streams_never_fail(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", None)
        make_streams_safe()
        print("é \ud800")
        assert complain("nobody hears this", 2) == 2
    assert (tmp_path / "out").read_text() == "\\xe9 \\ud800\n"


def test_consoles_print_no_markup(capsys):
    console().print("[/x] :smile: [bold]b[/bold]")
    assert capsys.readouterr().out == "[/x] :smile: [bold]b[/bold]\n"


def test_complaints_are_one_line(capsys):
    assert complain("first\n  second\tthird \x1b[31m", 2) == 2
    assert capsys.readouterr().err == "precede: first second third \\x1b[31m\n"


def test_progress_is_silent_without_a_terminal(capsys):
    with progress_bar("working") as advance:
        advance(1, 2, "half")
    assert capsys.readouterr() == ("", "")


def test_consoles_write_where_they_say(capsys):
    console().print("result")
    console(stderr=True).print("note")
    assert capsys.readouterr() == ("result\n", "note\n")
    assert console().width == 120
