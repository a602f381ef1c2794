"""How the app connects to the broker: as Celery does, with connections that treat passing refusals as outages."""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP
from kombu import Connection

from cellama.tasks.connection.refusals import be_patient_in_channels


class PatientConnection(Connection):  # type: ignore[misc]
    """Kombu's, whose channels raise RefusedForNow. Its clones, which kombu's pools hold, do so as well."""

    def create_transport(self) -> Any:
        return be_patient_in_channels(super().create_transport())


class PatientAMQP(AMQP):  # type: ignore[misc]
    """Celery's, which makes these connections."""

    Connection = PatientConnection
