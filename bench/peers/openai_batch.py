"""OpenAI's batch script as its users have it: upload, begin, wait, download. FILE in, OUTPUT and ERRORS out.

Which server it asks is OpenAI's own environment: OPENAI_BASE_URL, OPENAI_API_KEY.
"""

import sys
import time
from pathlib import Path

from openai import OpenAI

source, output, errors = map(Path, sys.argv[1:])
client = OpenAI()
file = client.files.create(file=source.open("rb"), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": source.name}
)
print(batch.id, flush=True)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(1)
    batch = client.batches.retrieve(batch.id)
for file_id, path in ((batch.output_file_id, output), (batch.error_file_id, errors)):
    path.write_bytes(client.files.content(file_id).content if file_id else b"")
print(batch.status, flush=True)
