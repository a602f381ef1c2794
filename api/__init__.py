"""For producers and people: the client in Python, the command line, a Redis for this machine.

from cellama.api import Client
job = Client().generate("tiny", "Once upon a time")
for event in job.stream(): ...
"""

from .client.async_client import AsyncClient, AsyncJob
from .client.client import Client, Job

__all__ = ["AsyncClient", "AsyncJob", "Client", "Job"]
