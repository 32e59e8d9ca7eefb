"""The broker's listeners: which protocol is spoken on each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.broker.bulk import BulkTransport
from nearcast.broker.transports import ClientTransport
from nearcast.config import LINK_KINDS, Listener
from nearcast.serving.links import LinkTransport
from nearcast.serving.listeners import BaseListener
from nearcast.serving.sockets import ANOTHER_PROCESS

if TYPE_CHECKING:
    from nearcast.broker.process import Broker

ANOTHER_BULK_PORT = f"{ANOTHER_PROCESS} --bulk-port takes another port for the bulk port, --no-bulk-port goes without"
ANOTHER_LINK_PORT = f"{ANOTHER_PROCESS} --link-port takes another port for links"


class BoundListener(BaseListener):
    """A listener of the broker."""

    def __init__(self, broker: Broker, config: Listener) -> None:
        super().__init__(broker, config)
        self._broker = broker
        self._transport_class: type[ClientTransport] | type[BulkTransport] = ClientTransport
        if config.kind in ("ws", "wss"):
            # Imported here: a broker without WebSocket listeners does not carry the library.
            from nearcast.broker.websocket import WebSocketTransport

            self._transport_class = WebSocketTransport
        elif config.kind in ("bulk", "bulk-tls"):
            self._transport_class = BulkTransport
            self.when_taken = ANOTHER_BULK_PORT
        elif config.kind in LINK_KINDS:
            self.when_taken = ANOTHER_LINK_PORT

    def make_transport(self) -> ClientTransport | BulkTransport | LinkTransport:
        links = self._broker.links
        if links is not None and self.config.kind in LINK_KINDS:
            return links.transport_for(self)
        return self._transport_class(self._broker, self)
