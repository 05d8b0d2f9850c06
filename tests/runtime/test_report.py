"""Tables show what the data says."""

from precede.report import Report, decision_table, generation_table, pass_table, plain
from precede.runtime.request import RequestOutput, Timings

PASS = {
    "name": "mega_gate",
    "numerics": "exact",
    "matches": 39,
    "expected": 40,
    "misses": [{"node": "L7.ffn.gate.sqrt", "reason": "want aten.sqrt, got [aten.exp]"}],
    "nodes_before": 15700,
    "nodes_after": 14800,
    "seconds": 0.25,
}


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"│ {first}"))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_passes_with_their_misses():
    text = plain(pass_table([PASS, {**PASS, "name": "canonicalize", "expected": None, "misses": []}]))
    assert cells(text, "mega_gate") == ["mega_gate", "39", "40", "1", "15700", "14800", "0.25"]
    assert cells(text, "canonicalize")[1:4] == ["39", "any", "0"]
    assert "mega_gate missed L7.ffn.gate.sqrt: want aten.sqrt, got [aten.exp]" in text


def test_equal_decisions_share_a_line():
    def decision(op: str, why: str = "so") -> dict:
        refused = [{"implementation": "other", "reason": "cannot"}]
        return {"op": op, "part": "main", "implementation": "reference", "reason": why, "refused": refused}

    text = plain(decision_table([decision("aten.add"), decision("aten.mul"), decision("aten.sub", "as asked")]))
    assert cells(text, "2 operators")[1:] == ["main", "reference", "so"]
    assert cells(text, "aten.sub")[1:] == ["main", "reference", "as asked"]
    assert text.count("not other") == 2


def test_report_is_data_and_text():
    report = Report(passes=(PASS,), parts=(), decisions=())
    assert report.json() == {"passes": [PASS], "parts": [], "decisions": []}
    assert "mega_gate" in str(report)


def test_what_files_say_is_no_markup():
    decision = {"op": "[/x]", "part": "[/x]", "implementation": ":smile:", "reason": "[b]\x1b[2J", "refused": []}
    part = {"name": "[/x]", "backend": "[/x]", "nodes": 1, "inputs": [], "outputs": []}
    report = Report(passes=({**PASS, "name": "[/x]"},), parts=(part,), decisions=(decision,))
    text = plain(report)
    assert cells(text, "[/x]")[0] == "[/x]"
    assert ":smile:" in text
    assert "[b]\\x1b[2J" in text
    assert "  [/x] missed L7" in text


def test_generation_times():
    def output(*seconds: float) -> RequestOutput:
        return RequestOutput(
            prompt=None,
            prompt_token_ids=(1, 2, 3),
            text="",
            token_ids=(4,) * (1 + len(seconds)),
            finish_reason="length",
            stop_reason=None,
            samples=(),
            timings=Timings(prefill_seconds=0.5, token_seconds=seconds),
        )

    text = plain(generation_table([output(0.1, 0.2, 0.3), output()]))
    assert cells(text, "      0") == ["0", "3", "4", "length", "500.0 ms", "200.0 ms", "5.0"]
    assert cells(text, "      1")[4:] == ["500.0 ms", "-", "-"]
