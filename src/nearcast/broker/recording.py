"""An event for every message of a workload that a broker processes: what excess data is counted from.

Owns the broker's part in :mod:`nearcast.recording`: which messages belong to a workload is told by the identity in their
payload, everything else is passed over. A disk that fails ends the recording, with a line in the log, and not the broker.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from nearcast.broker.links import broker_name
from nearcast.clock import Clock
from nearcast.config import BrokerConfig
from nearcast.errors import StorageUnavailable
from nearcast.fabric.envelopes import payload_of
from nearcast.mqtt.publication import Publication
from nearcast.recording import EventWriter, MessageEvent, message_id
from nearcast.scenario.identity import decode_identity
from nearcast.serving import logs


class ProcessedMessages:
    """The :class:`~nearcast.mqtt.witnesses.Witness` of a broker whose configuration names a directory for events."""

    def __init__(self, config: BrokerConfig, directory: str, clock: Clock) -> None:
        settings = config.recording
        self.name = settings.name or broker_name(config)
        self.events = 0
        self._cloud = settings.cloud
        self._wall_offset_s = clock.wall() - clock.monotonic()
        self._writer: EventWriter | None = EventWriter(directory, settings.run, source=self.name)

    def processed(self, publication: Publication, now: float) -> None:
        for payload in publication.payloads():
            self._write(self.name, publication, payload, now)

    def relayed(self, publication: Publication, index: int, now: float) -> None:
        self._write(self._cloud, publication, payload_of(publication, index), now)

    def flush(self) -> None:
        """Now and then: what was recorded lately goes to the disk too."""
        if self._writer is not None:
            try:
                self._writer.flush()
            except StorageUnavailable as error:
                self._give_up(error)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except StorageUnavailable as error:
                self._give_up(error)

    def _write(self, broker: str, publication: Publication, payload: bytes, now: float) -> None:
        writer = self._writer
        identity = decode_identity(payload)
        if writer is None or identity is None:
            return
        event = MessageEvent(
            kind="processed",
            at_ns=int((now + self._wall_offset_s) * 1e9),
            client=broker,
            message_id=message_id(identity.publisher, identity.sequence),
            sequence=identity.sequence,
            topic=publication.topic.decode("utf-8"),
            sent_ns=identity.sent_ns,
            qos=publication.qos,
            retained=publication.retain,
            size_bytes=len(payload),
            path=(broker,),
        )
        try:
            writer.write(event)
        except StorageUnavailable as error:
            self._give_up(error)
            return
        self.events += 1

    def _give_up(self, error: StorageUnavailable) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(StorageUnavailable):  # its thread ends, and has nothing left to write to
                writer.close()
        logs.event(logging.ERROR, "messages are no longer recorded", path=error.path, reason=str(error))
