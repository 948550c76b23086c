"""`sage-patch ablate` over the models that come with this repository, on one page: docs/ablation.md and its JSON.

    python scripts/operator_ablation.py

Runs on a CPU in a few minutes. A model whose package is not installed is left out, which is said.
"""

from __future__ import annotations

import time
from pathlib import Path

from sage_patch.config import load_run_config
from sage_patch.evaluation.ablation import ablate_model, write_ablation
from sage_patch.evaluation.models import ModelError, quiet_loading

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {
    "lm-tiny-d128": "tiny.yaml",
    "SmolLM2-135M": "quickstart.yaml",
    "small Flux": "quickstart_image.yaml",
    "small Wan": "quickstart_video.yaml",
}


def main() -> None:
    quiet_loading()
    found = {}
    for title, config in CONFIGS.items():
        start = time.perf_counter()
        loaded = load_run_config(ROOT / "configs" / config)
        try:
            found[title] = ablate_model(loaded, title, lambda label, done, total: None, per_site=2)
        except ModelError as error:
            print(f"{title}: left out, {error}")
            continue
        print(f"{title}: {found[title]['ablation']['calls']} calls, {time.perf_counter() - start:.0f} s", flush=True)
    results, text, anatomy = write_ablation(ROOT / "docs/results", "python scripts/operator_ablation.py", found)
    page = text.read_text().replace("`ablation.json`", "`docs/results/ablation.json`")
    text.unlink()
    (ROOT / "docs/ablation.md").write_text(page)
    print(f"wrote {results}, {anatomy} and docs/ablation.md")


if __name__ == "__main__":
    main()
