"""The native Python client: MQTT 3.1.1 and 5.0 over TCP, TLS, WebSocket and Unix sockets.

    async with Client("mqtt://localhost") as client:
        await client.subscribe("sensors/#", qos=1)
        await client.publish("sensors/door", "open", qos=1)
        async for message in client.messages:
            print(message.topic, message.text)

:mod:`nearcast.client.sync` offers the same without asyncio.

Topics that the broker keeps are read by index, followed and written through its bulk port: :class:`Topics`, or without
asyncio :class:`BlockingTopics`.
"""

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.client import Client
from nearcast.client.endpoints import Endpoint, TlsOptions
from nearcast.client.messages import Message, MessageStream
from nearcast.client.records import Batch, KeptRule, Record, TopicState
from nearcast.client.topics import Topics
from nearcast.config import Retention
from nearcast.mqtt.client_events import Authentication
from nearcast.mqtt.client_reconnection import Backoff
from nearcast.mqtt.packets import Properties, SubscriptionRequest, Will
from nearcast.topiclog.conversation import MissingRecords

__all__ = [
    "Authentication",
    "Backoff",
    "Batch",
    "BlockingTopics",
    "Client",
    "Endpoint",
    "KeptRule",
    "Message",
    "MessageStream",
    "MissingRecords",
    "Properties",
    "Record",
    "Retention",
    "SubscriptionRequest",
    "TlsOptions",
    "TopicState",
    "Topics",
    "Will",
]
