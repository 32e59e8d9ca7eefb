"""Topics of class owned without anybody who says who owns them."""

from __future__ import annotations

import pytest

from nearcast.broker.links import refuse_ownerless
from nearcast.broker.process import Broker
from nearcast.config import BrokerConfig
from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric, TopicClass

RULES = (TopicClass(topic="plain", topic_class="local"), TopicClass(topic="swarm/#", topic_class="owned"))


def test_a_broker_that_knows_no_controller_is_refused_such_topics() -> None:
    with pytest.raises(ConfigError, match=r"topics of class owned .swarm/#. need a controller") as refused:
        Broker(BrokerConfig(fabric=Fabric(classes=RULES)))
    assert refused.value.key == "fabric.classes"


def test_with_a_controller_they_are_fine() -> None:
    refuse_ownerless(Fabric(classes=RULES, controller="127.0.0.1:1885", secret_file="secret"))
    refuse_ownerless(Fabric(classes=RULES[:1]))
