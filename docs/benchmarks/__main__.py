"""Write the tables and figures of the benchmarks again, from results/*.json.

python -m docs.benchmarks            # from the repository's root; figures need chromium
"""

from __future__ import annotations

from docs.benchmarks.charts import PICTURES, figures, markdown
from docs.benchmarks.drawing import drawn
from docs.benchmarks.tables import filled, pages, read_results

results, shown = read_results(), figures()
for page in pages():
    text = page.read_text(encoding="utf-8")
    page.write_text(filled(text, results, lambda name: markdown(name, shown[name])), encoding="utf-8")
PICTURES.mkdir(exist_ok=True)
old = {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
stale = {name: each.picture for name, each in shown.items() if each.mark not in old.get(name, "")}
charts = {name: picture for name, picture in stale.items() if not isinstance(picture, str)}
made = {name: picture for name, picture in stale.items() if isinstance(picture, str)}
for name, picture in (made | (drawn(charts) if charts else {})).items():
    (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
