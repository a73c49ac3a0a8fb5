"""README's main use is taken from the example that shows it whole."""

from __future__ import annotations

import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_main_blocks_are_excerpts_of_the_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## Use it in your own TorchRec script\n")[1].split("\n#")[0]
    script = (ROOT / "examples" / "torchrec_dlrm.py").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in section.split("```python\n")[1:]]
    imports = [line for block in blocks for line in block.splitlines() if line.startswith(("import ", "from "))]
    assert set(imports) <= set(script.splitlines())
    bodies = [
        "".join(f"{line}\n" for line in block.splitlines() if line not in imports).strip("\n") for block in blocks
    ]
    for body in bodies:
        assert textwrap.indent(f"{body}\n", " " * 4) in script, f"not in the example as it stands: {body}"
    assert "ShufflerOptions(" in bodies[0] and "global_mean_loss(" in bodies[1] and len(bodies) == 2
