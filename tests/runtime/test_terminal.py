"""What reaches a terminal, and what does not."""

from precede.terminal import complain, console, printable, progress_bar


def test_printable_keeps_text_and_disarms_controls():
    assert printable("é🙂 a\n\tb") == "é🙂 a\n\tb"
    assert printable("\x1b[2J\x00\x9b\u202e") == "\\x1b[2J\\x00\\x9b\\u202e"


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
