"""Ask a model about each row of a CSV file. Run `python sort_reviews.py reviews.csv sorted.csv`.

If the run is interrupted, repeat the command to resume the run.
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
    answers = output.with_suffix(".answers.csv")  # all columns of the reviews, and the answers
    with Client() as client:
        summary = client.batch(
            reviews,
            answers,
            model="tiny",
            as_kind="chat",
            template="Is this review good or bad? {review}",
            json_schema=SCHEMA,
            temperature=0,
            max_tokens=20,
        )
    with answers.open(encoding="utf-8", newline="") as source, output.open("w", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(source))
        writer = csv.writer(file)
        writer.writerow(["id", "review", "mood"])
        writer.writerows([row["id"], row["review"], json.loads(row["output"])["mood"]] for row in rows)
    print(f"{summary.state}: {len(rows)} of {summary.progress.total} reviews")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
