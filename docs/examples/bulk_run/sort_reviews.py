"""Ask a model about each line of a CSV file: python sort_reviews.py reviews.csv sorted.csv

After an interruption, run the same command to resume.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from cellama.api import Client

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


def main(reviews: Path, output: Path) -> None:
    rows = list(csv.DictReader(reviews.read_text(encoding="utf-8").splitlines()))
    questions, answers = output.with_suffix(".in.jsonl"), output.with_suffix(".out.jsonl")
    questions.write_text("".join(json.dumps(question(row)) + "\n" for row in rows), encoding="utf-8")
    with Client() as client:
        summary = client.batch(questions, answers, model="tiny", json_schema=SCHEMA, temperature=0, max_tokens=20)
    lines = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
    found = {line["id"]: json.loads(line["message"]["content"])["mood"] for line in lines}
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "mood"])
        writer.writeheader()
        writer.writerows({**row, "mood": found.get(row["id"], "")} for row in rows)
    print(f"{summary.state}: {len(found)} of {len(rows)} reviews")


def question(row: dict[str, str]) -> dict[str, object]:
    text = f"Is this review good or bad? {row['review']}"
    return {"id": row["id"], "messages": [{"role": "user", "content": text}]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
