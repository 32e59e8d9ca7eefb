"""The controller and registrations, in virtual time: who is told what, when, and why."""

from __future__ import annotations

import msgspec
import pytest

from nearcast.fabric.control import ClassRule, ClassRules
from nearcast.fabric.controlling import ControlSettings, Refused
from tests.control_harness import Net


def two_brokers(**options: object) -> Net:
    net = Net(**options)  # type: ignore[arg-type]
    net.add_broker("near")
    net.add_broker("far")
    net.run(1.0)
    return net


def settled(net: Net, home: str, *gateways: str) -> None:
    """Wait until these gateways have all clients at a broker and nothing is pending."""

    def there() -> bool:
        chosen = [net.gateway(name) for name in gateways]
        at_home = all(gateway.home == home and set(gateway.clients.values()) <= {home} for gateway in chosen)
        return at_home and not net.controller.moves.pending

    net.run_until(there, f"all clients at {home}")


# --- registering ----------------------------------------------------------------------------------------------------------


def test_brokers_hear_of_each_other_and_gateways_of_brokers() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(1.0)
    assert set(net.registrants["near"].known) == {"far"}
    assert set(net.registrants["far"].known) == {"near"}
    assert set(gateway.known) == {"near", "far"}
    assert gateway.known["near"].link == "near:1884"
    assert [entry.state for entry in net.controller.entries.values()] == ["up", "up", "up"]


def test_a_host_that_stands_for_every_interface_is_replaced_by_the_one_that_was_seen() -> None:
    net = Net()
    registration = net.add_broker("b")
    registrant = net.registrants["b"]
    registrant.facts = msgspec.structs.replace(registrant.facts, link="0.0.0.0:1884", mqtt="mqtt://0.0.0.0:1883")
    net.run(1.0)
    node = net.controller.entries["b"].node
    assert node.link == "10.0.0.2:1884"
    assert node.mqtt == "mqtt://10.0.0.2:1883"
    assert registration.up


def test_a_node_cannot_register_another_one() -> None:
    net = Net()
    net.add_broker("b")
    net.registrants["b"].facts = msgspec.structs.replace(net.registrants["b"].facts, name="somebody else")
    net.run(1.0)
    assert net.controller.entries == {}


def test_a_second_node_of_the_same_name_is_refused_while_the_first_is_there() -> None:
    net = two_brokers()
    first = net.controller.entries["near"].node.epoch
    old = net.machines["near"]
    net.add_broker("near")  # the harness forgets the first one, the controller does not
    net.machines["first"] = old
    net.run(2.0)
    assert net.controller.entries["near"].node.epoch == first
    net.hang("first")
    net.run_until(lambda: net.controller.entries["near"].node.epoch != first, "the second one once the first is silent")


def test_a_node_that_is_refused_tries_less_and_less_often() -> None:
    net = two_brokers()
    net.machines["first"] = net.machines["near"]
    net.add_broker("near")
    broken = net.machines["controller"].hub.protocol_errors
    net.run(60.0)
    assert 5 <= net.machines["controller"].hub.protocol_errors - broken <= 20


def test_a_broker_that_stops_gets_no_more_clients_and_has_left_when_its_link_ends() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(5.0)
    registration = net.machines["near"].hub.users[3]
    registration.leave(net.now)
    net.machines["near"].flush()
    net.run(0.5)
    assert gateway.known["near"].draining
    assert gateway.home == "far", "it is told where to go; moving is done for LEAVING"
    assert not gateway.gone
    net.kill("near")
    net.run(0.5)
    assert [(departure.name, departure.left) for departure in gateway.gone] == [("near", True)]
    assert net.controller.entries["near"].state == "left"


def test_a_broker_with_its_sessions_on_disk_does_not_leave_for_good() -> None:
    net = two_brokers()
    net.registrants["near"].for_good = False
    net.machines["near"].hub.users[3].leave(net.now)
    net.machines["near"].flush()
    net.run(0.5)
    net.kill("near")
    net.run(0.5)
    assert [(departure.name, departure.left) for departure in net.registrants["far"].gone] == [("near", False)]


# --- measuring and moving -------------------------------------------------------------------------------------------------


def test_a_gateway_is_moved_to_the_nearest_broker_as_soon_as_it_is_measured() -> None:
    net = two_brokers()
    net.add_gateway("g", clients=3, home="far", near=1.0, far=80.0)
    took_s = net.run_until(lambda: net.gateway("g").home == "near", "moved to the near broker")
    assert took_s < 5.0, "ten pings and a moment, not the next 15 s"
    settled(net, "near", "g")
    (move,) = net.controller.moves.past
    assert (move.kind, move.state, move.moved_clients, move.origin) == ("nearer", "done", 3, "far")
    assert "near is at 1.0 ms, far at 80.0 ms" in move.reason


def test_a_new_broker_gets_the_clients_it_is_nearest_to() -> None:
    net = Net()
    net.add_broker("far")
    net.add_gateway("g", home="far", near=1.0, far=80.0)
    net.run(20.0)
    net.add_broker("near")
    assert net.run_until(lambda: net.gateway("g").home == "near", "moved") < 6.0
    settled(net, "near", "g")


def test_a_gateway_that_travels_is_noticed_within_a_period() -> None:
    net = two_brokers()
    net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(60.0)
    assert not net.gateway("g").orders
    net.set_rtt("g", "near", 90.0)
    net.set_rtt("g", "far", 2.5)
    took_s = net.run_until(lambda: net.gateway("g").home == "far", "followed")
    assert took_s < 36.0, "a near and steady path is looked at every second period"


def test_a_client_that_comes_is_known_in_a_moment() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", clients=1, home="near", near=1.0, far=80.0)
    net.run(20.0)
    reports = net.controller.reports
    gateway.clients["new"] = "near"
    took_s = net.run_until(lambda: "new" in net.controller.entries["g"].clients, "known")
    assert took_s < 1.2
    assert net.controller.reports <= reports + 2, "and nobody reports for nothing"


def test_a_gateway_that_chose_by_itself_is_not_moved_for_that() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=1.2)
    gateway.home = ""
    net.run(30.0)
    assert not gateway.orders
    assert net.controller.entries["g"].home == "near"


def test_load_is_balanced_among_equals_and_then_rests() -> None:
    net = Net()
    net.add_broker("one")
    for number in range(10):
        net.add_gateway(f"g{number}", home="one", one=0.5, two=0.6)
    net.run(20.0)
    net.add_broker("two")
    net.run(60.0)
    homes = [net.gateway(f"g{number}").home for number in range(10)]
    assert homes.count("one") == homes.count("two") == 5
    moved = sum(net.controller.moves.counts.values())
    assert moved == 5
    net.run(120.0)
    assert sum(net.controller.moves.counts.values()) == moved, "nobody wanders"


def test_orders_go_over_udp_and_over_the_link_when_that_is_silent() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.datagrams.clear()
    net.controller.move("far", net.now, gateway="g")
    settled(net, "far", "g")
    sizes = [len(data) for source, address, data in net.datagrams if "controller" in (source, address.partition(":")[0])]
    assert sizes.count(47) == 2, "RECONNREQ and RECONNACK"
    # Without UDP the same.
    net.controller.entries["g"].node = msgspec.structs.replace(net.controller.entries["g"].node, monitoring="nowhere:1")
    net.controller.move("near", net.now, gateway="g")
    net.machines["controller"].flush()
    assert net.run_until(lambda: gateway.home == "near", "moved over the link") < 3.0
    assert [order.target for order in gateway.orders] == ["far", "near"], "each order is carried out once"


def test_an_order_to_a_broker_that_the_gateway_has_not_heard_of_follows_over_the_link() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.machines["g"].monitor.forget("far")
    move = net.controller.move("far", net.now, gateway="g")
    net.machines["controller"].flush()
    net.run(0.5)
    assert gateway.home == "near"
    net.run_until(lambda: gateway.home == "far", "moved over the link", 3.0)
    net.run(0.5)
    assert move.state == "done"


def test_a_move_that_fails_is_not_tried_again_at_once() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="far", near=1.0, far=80.0)
    gateway.unable = "near does not take the session"
    net.run(30.0)
    assert len(gateway.orders) == 1
    (move,) = net.controller.moves.past
    assert (move.state, move.detail) == ("failed", "near does not take the session")
    gateway.unable = ""
    settled(net, "near", "g")


def test_a_gateway_that_can_go_nowhere_is_asked_less_and_less_often() -> None:
    net = two_brokers()
    net.add_broker("third")
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0, third=90.0)
    net.run(20.0)
    gateway.unable = "nothing works"
    net.kill("near")
    net.run(120.0)
    assert 3 <= len(gateway.orders) <= 10
    gateway.unable = ""
    net.run_until(lambda: gateway.home in ("far", "third"), "moved in the end", 90.0)


def test_a_gateway_that_never_answers_an_order_has_failed_it() -> None:
    net = Net(control=ControlSettings(move_timeout_s=3.0, retry_s=1000.0))
    net.add_broker("near")
    net.add_broker("far")
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    gateway.stubborn = True
    net.controller.move("far", net.now, gateway="g")
    gateway.registration.link.close("the link breaks")  # type: ignore[union-attr]
    net.machines["g"].flush()
    net.hang("g")
    net.run(4.0)
    assert [move.state for move in net.controller.moves.past] == ["failed"]


# --- failures -------------------------------------------------------------------------------------------------------------


def test_clients_of_a_broker_that_died_are_moved_at_once() -> None:
    net = two_brokers()
    for number in range(30):
        net.add_gateway(f"g{number}", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.kill("near")
    took_s = net.run_until(lambda: all(net.gateway(f"g{number}").home == "far" for number in range(30)), "all moved")
    assert took_s < 2.0
    assert net.controller.entries["near"].state == "down"
    assert {move.kind for move in net.controller.moves.past} == {"gone"}
    assert not any(departure.left for departure in net.registrants["far"].gone), "what is kept for it stays"


def test_a_broker_that_hangs_is_found_out_though_its_stream_stands() -> None:
    net = two_brokers()
    for number in range(4):
        net.add_gateway(f"g{number}", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.hang("near")
    took_s = net.run_until(lambda: net.gateway("g0").home == "far", "moved")
    assert took_s < 10.0
    assert net.controller.entries["near"].state == "down"
    net.resume("near")
    net.run_until(lambda: net.controller.entries["near"].state == "up", "it registers again")
    assert "suspect" not in {entry.state for entry in net.controller.entries.values()}


def test_a_broker_that_only_the_controller_does_not_reach_stays() -> None:
    net = two_brokers()
    for number in range(4):
        net.add_gateway(f"g{number}", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.part("controller", "near")
    net.run(60.0)
    assert net.controller.entries["near"].state == "suspect"
    assert net.gateway("g0").home == "near"
    net.heal()
    net.run_until(lambda: net.controller.entries["near"].state == "up", "it is back")
    assert net.controller.moves.counts.get("done", 0) == 0


@pytest.mark.parametrize("seconds", [8.0, 60.0])
def test_a_controller_that_is_cut_off_gives_up_nobody(seconds: float) -> None:
    net = two_brokers()
    for number in range(4):
        net.add_gateway(f"g{number}", home="near", near=1.0, far=80.0)
    net.run(20.0)
    for name in ("near", "far", "g0", "g1", "g2", "g3"):
        net.part("controller", name)
    net.run(seconds)
    net.heal()
    net.run(20.0)
    assert {entry.state for entry in net.controller.entries.values()} == {"up"}
    assert not net.registrants["far"].gone
    assert net.controller.moves.counts == {}


def test_a_controller_that_was_cut_off_from_most_moves_nobody_off_brokers_that_come_back_later() -> None:
    net = two_brokers()
    net.add_broker("beside")
    net.add_gateway("g", home="near", near=1.0, far=80.0, beside=90.0)
    net.run(20.0)
    for name in ("near", "far", "g"):
        net.part("controller", name)
        net.part("beside", name)
    net.run(30.0)
    assert net.controller.entries["near"].state == "down", "as far as can be seen from here"
    net.cut = {frozenset(("controller", "near")), frozenset(("beside", "near"))}
    net.run(30.0)
    assert net.gateway("g").home == "near", "it has its clients there, so the broker is there"
    net.heal()
    net.run(20.0)
    assert not net.gateway("g").orders


def test_a_broker_that_comes_back_is_a_member_again() -> None:
    net = two_brokers()
    net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.kill("near")
    net.run(5.0)
    net.add_broker("near")
    net.run_until(lambda: net.gateway("g").home == "near", "moved back")
    assert net.controller.entries["near"].state == "up"


def test_a_restarted_controller_learns_everything_and_moves_nobody() -> None:
    net = two_brokers()
    net.add_gateway("g", clients=5, home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.controller.set_class("a/#", "local", net.now)
    net.controller.drain("far", True, net.now)
    net.machines["controller"].flush()
    net.run(1.0)
    net.registrants["far"].facts = msgspec.structs.replace(net.registrants["far"].facts, draining=True)
    orders = len(net.gateway("g").orders)
    net.restart_controller()
    net.run_until(lambda: len(net.controller.entries) == 3, "all registered again")
    net.run(30.0)
    assert net.controller.rules.rules == (ClassRule("a/#", "local"),)
    assert net.controller.entries["far"].draining
    assert net.controller.entries["g"].home == "near"
    assert len(net.controller.entries["g"].clients) == 5
    assert set(net.controller.entries["g"].measured) == {"near", "far"}
    assert len(net.gateway("g").orders) == orders
    assert not net.registrants["near"].gone


def test_a_gateway_at_a_broker_that_is_not_known_yet_is_left_alone() -> None:
    net = Net()
    net.add_broker("far")
    net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(60.0)
    assert not net.gateway("g").orders


def test_an_older_controllers_recorded_order_counts_for_nothing() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.controller.move("far", net.now, gateway="g")
    settled(net, "far", "g")
    recorded = [data for _, _, data in net.datagrams if len(data) == 47]
    net.controller.move("near", net.now, gateway="g")
    settled(net, "near", "g")
    for data in recorded:
        net.datagram("attacker", "g:1", data)
    net.run(1.0)
    net.restart_controller()
    net.run(20.0)
    for data in recorded:
        net.datagram("attacker", "g:1", data)
    net.run(1.0)
    assert gateway.home == "near"
    assert [order.target for order in gateway.orders] == ["far", "near"]


# --- what people ask for --------------------------------------------------------------------------------------------------


def test_one_client_is_moved_by_hand_and_stays_there() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", clients=3, home="near", near=1.0, far=80.0)
    net.run(20.0)
    move = net.controller.move("far", net.now, client="g-1")
    net.machines["controller"].flush()
    net.run(40.0)
    assert move.state == "done"
    assert gateway.clients == {"g-0": "near", "g-1": "far", "g-2": "near"}
    assert gateway.home == "near"


def test_a_gateway_moved_by_hand_is_held_there_for_a_while() -> None:
    net = Net(control=ControlSettings(hold_s=60.0))
    net.add_broker("near")
    net.add_broker("far")
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.controller.move("far", net.now, gateway="g")
    settled(net, "far", "g")
    net.run(40.0)
    assert gateway.home == "far"
    net.run(40.0)
    assert gateway.home == "near"


def test_a_held_gateway_leaves_a_broker_that_dies() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.controller.move("far", net.now, gateway="g")
    settled(net, "far", "g")
    net.kill("far")
    net.run_until(lambda: gateway.home == "near", "moved")


def test_a_drain_empties_a_broker_one_gateway_after_the_other() -> None:
    net = two_brokers()
    for number in range(5):
        net.add_gateway(f"g{number}", clients=4, home="near", near=1.0, far=80.0)
    net.run(20.0)
    for number in range(1, 5):
        net.gateway(f"g{number}").stubborn = True
    net.controller.drain("near", True, net.now, clients_per_second=2.0)
    net.machines["controller"].flush()
    net.run(2.0)
    under_way = [move for move in net.controller.moves.pending.values() if move.state != "waiting"]
    assert len(under_way) <= 1
    assert net.registrants["near"].drains == [True]
    assert net.registrants["far"].known["near"].draining
    for number in range(1, 5):
        gateway = net.gateway(f"g{number}")
        gateway.stubborn = False
    net.run_until(lambda: net.controller.drained(net.controller.entries["near"]) == 0, "drained", 300.0)
    orders = [order for number in range(5) for order in net.gateway(f"g{number}").orders]
    assert {order.clients_per_second for order in orders} == {2.0}
    net.controller.drain("near", False, net.now)
    net.machines["controller"].flush()
    net.run_until(lambda: all(net.gateway(f"g{number}").home == "near" for number in range(5)), "back", 120.0)
    assert net.registrants["near"].drains == [True, False]


def test_a_drain_finds_clients_that_were_moved_there_by_hand() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", clients=3, home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.controller.move("far", net.now, client="g-1")
    net.machines["controller"].flush()
    net.run(6.0)
    assert gateway.clients["g-1"] == "far"
    net.controller.drain("far", True, net.now)
    net.machines["controller"].flush()
    net.run(2.0)
    assert set(gateway.clients.values()) == {"near"}
    assert gateway.home == "near"
    assert gateway.orders[-1].origin == "far"


def test_an_order_that_a_broken_link_swallowed_is_given_again() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    move = net.controller.move("far", net.now, client="g-0")
    net.kill("g")  # before it arrives
    net.resume("g")
    net.machines["g"].hub.dial("controller:1885", net.now)
    for link in list(net.machines["g"].hub.links):
        net.machines["g"].hub.lost(link, net.now)
    net.run_until(lambda: gateway.clients["g-0"] == "far", "moved after all")
    net.run(1.0)
    assert move.state == "done"


def test_a_gateway_whose_link_is_new_is_told_its_ranking_again() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    assert gateway.assignments[-1].ranking == ("near", "far")
    gateway.assignments.clear()
    net.run(60.0)
    assert not gateway.assignments, "nothing changed, nothing is said"
    gateway.registration.link.close("the link breaks")  # type: ignore[union-attr]
    net.machines["g"].flush()
    net.run(30.0)
    assert [assignment.ranking for assignment in gateway.assignments] == [("near", "far")]


def test_an_outcome_that_a_broken_link_swallowed_is_asked_for_again() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.set_rtt("controller", "g", 400.0)
    net.run(20.0)
    move = net.controller.move("far", net.now, gateway="g")
    net.machines["controller"].flush()
    net.run_until(lambda: bool(gateway.orders), "the order")
    net.kill("g")  # while the report is on its way
    net.resume("g")
    for link in list(net.machines["g"].hub.links):
        net.machines["g"].hub.lost(link, net.now)
    net.run(10.0)
    assert move.state == "done"


def test_a_node_without_a_controller_is_due_for_nothing_that_only_a_controller_hears() -> None:
    """News of a path, found while there is nobody to report it to, kept the node awake: all of its time went into that."""
    net = Net()
    net.add_broker("a")
    gateway = net.add_gateway("g", a=10.0)
    net.run(5.0)
    net.kill("controller")
    net.run(1.0)
    net.kill("a")
    for _ in range(200):
        net.run(0.1)
        assert gateway.registration is not None
        assert gateway.registration.next_deadline() > net.now


def test_an_order_that_was_overtaken_is_not_said_again() -> None:
    net = two_brokers()
    net.add_broker("third")
    gateway = net.add_gateway("g", home="near", near=1.0, far=80.0, third=90.0)
    net.run(20.0)
    net.controller.move("far", net.now, gateway="g")
    lost = [data for _, data in net.machines["controller"].monitor.take_outgoing() if len(data) == 47]
    net.controller.move("third", net.now, gateway="g")
    net.machines["controller"].flush()
    net.run(1.5)
    assert [order.target for order in gateway.orders] == ["third"]
    for data in lost:
        net.datagram("controller", "g:1", data)
    net.run(1.5)
    assert gateway.home == "third", "nor does it count when it arrives late"


def test_word_of_other_things_does_not_undo_an_order() -> None:
    net = two_brokers()
    net.add_broker("third")
    gateway = net.add_gateway("g", clients=3, home="near", near=1.0, far=80.0, third=90.0)
    net.run(20.0)
    gateway.stubborn = True
    net.controller.move("far", net.now, gateway="g")
    net.machines["controller"].flush()
    net.run(1.0)
    gateway.assignments.clear()
    net.controller.move("third", net.now, client="g-1")
    net.machines["controller"].flush()
    net.run(1.0)
    net.add_broker("fourth")
    net.run(3.0)
    assert {assignment.home for assignment in gateway.assignments} == {"far"}


def test_what_keeps_one_client_does_not_keep_the_others() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", clients=3, home="near", near=1.0, far=80.0)
    net.run(20.0)
    gateway.unable = "it went"
    net.controller.move("far", net.now, client="g-1")
    net.machines["controller"].flush()
    net.run(2.0)
    assert net.controller.moves.counts == {"failed": 1}
    (state,) = net.controller.snapshot(net.now).gateways
    assert set(state.latency_ms) == {"near", "far"}


def test_a_gateway_that_is_left_alone_is_a_load_like_any_other() -> None:
    net = two_brokers()
    net.add_gateway("g", clients=50, home="near", near=1.0, far=1.2)
    net.run(20.0)
    net.controller.move("far", net.now, gateway="g")
    settled(net, "far", "g")
    network = net.controller.snapshot(net.now)
    assert not network.gateways
    assert {broker.name: broker.connections for broker in network.brokers} == {"near": 0, "far": 50}


def test_a_drain_does_not_wait_for_a_gateway_that_cannot_be_told() -> None:
    net = two_brokers()
    for number in range(3):
        net.add_gateway(f"g{number}", clients=4, home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.machines["g0"].hub.forget_address("controller:1885")
    net.gateway("g0").registration.link.close("and it does not come back")  # type: ignore[union-attr]
    net.machines["g0"].flush()
    net.run(5.0)
    assert net.controller.entries["g0"].state == "suspect", "it answers probes"
    net.controller.drain("near", True, net.now)
    net.machines["controller"].flush()
    net.run_until(lambda: net.gateway("g1").home == net.gateway("g2").home == "far", "the others are moved")


def test_clients_that_cannot_be_gathered_are_asked_for_less_and_less_often() -> None:
    net = two_brokers()
    gateway = net.add_gateway("g", clients=3, home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.controller.move("far", net.now, client="g-1")
    net.machines["controller"].flush()
    net.run(6.0)
    gateway.orders.clear()
    gateway.unable = "not now"
    net.controller.drain("far", True, net.now)
    net.machines["controller"].flush()
    net.run(60.0)
    assert 3 <= len(gateway.orders) <= 10
    gateway.unable = ""
    net.run_until(lambda: set(gateway.clients.values()) == {"near"}, "gathered in the end", 90.0)


def test_a_drain_that_was_ended_while_the_broker_was_away_has_ended() -> None:
    net = two_brokers()
    registrant = net.registrants["near"]
    net.controller.drain("near", True, net.now)
    net.machines["controller"].flush()
    net.run(1.0)
    registrant.facts = msgspec.structs.replace(registrant.facts, draining=True)
    net.part("controller", "near")
    net.run(15.0)
    net.controller.drain("near", False, net.now)
    net.heal()
    net.run_until(lambda: registrant.drains[-1:] == [False], "it is told so")
    assert not net.controller.entries["near"].draining


def test_a_broker_that_stops_says_so_on_a_new_link_too() -> None:
    net = two_brokers()
    net.run(5.0)
    registration = net.machines["near"].hub.users[3]
    registration.leave(net.now)
    net.machines["near"].flush()
    net.run(0.5)
    registration.link.close("it breaks")  # type: ignore[attr-defined]
    net.machines["near"].flush()
    net.run_until(lambda: net.controller.entries["near"].link is not None, "it is back")
    net.run(0.5)
    assert net.controller.entries["near"].shunned


def test_paths_to_a_broker_that_is_gone_are_forgotten() -> None:
    net = two_brokers()
    net.add_gateway("g", home="near", near=1.0, far=80.0)
    net.run(20.0)
    net.kill("far")
    net.run(10.0)
    assert set(net.controller.entries["g"].measured) == {"near"}


def test_what_cannot_be_is_refused_with_a_reason() -> None:
    net = two_brokers()
    net.add_gateway("g", clients=1, home="near", near=1.0, far=80.0)
    net.run(20.0)
    controller = net.controller
    for target, options, words in (
        ("nobody", {"client": "g-0"}, "no node 'nobody'"),
        ("g", {"client": "g-0"}, "is a gateway"),
        ("far", {"client": "who"}, "no gateway has a client 'who'"),
        ("near", {"client": "g-0"}, "at near already"),
        ("far", {}, "say which client"),
        ("far", {"client": "g-0", "gateway": "g"}, "say which client"),
        ("far", {"gateway": "near"}, "to empty it, drain it"),
    ):
        with pytest.raises(Refused, match=words):
            controller.move(target, net.now, **options)
    with pytest.raises(Refused, match="brokers are drained"):
        controller.drain("g", True, net.now)
    controller.drain("far", True, net.now)
    with pytest.raises(Refused, match="being drained"):
        controller.move("far", net.now, client="g-0")
    with pytest.raises(Refused, match="no other broker"):
        controller.drain("near", True, net.now)
    for topic_filter, topic_class, words in (
        ("a/#/b", "local", "topic class of 'a/#/b'"),
        ("$share/g/a", "local", "shared subscription"),
        ("a", "owned-by-me", "no class 'owned-by-me'"),
    ):
        with pytest.raises(Refused, match=words):
            controller.set_class(topic_filter, topic_class, net.now)
    with pytest.raises(Refused, match="no rule"):
        controller.remove_class("a", net.now)


def test_classes_reach_every_broker_newest_first_and_are_learnt_from_brokers() -> None:
    net = two_brokers()
    net.controller.set_class("a/#", "local", net.now)
    net.controller.set_class("b/#", "bridged", net.now)
    net.controller.set_class("a/#", "bridged", net.now)
    net.machines["controller"].flush()
    net.run(1.0)
    expected = (ClassRule("a/#", "bridged"), ClassRule("b/#", "bridged"))
    assert net.registrants["near"].rules[-1].rules == expected
    net.add_broker("late")
    net.run(1.0)
    assert net.registrants["late"].rules[-1].rules == expected
    newer = ClassRules(net.controller.rules.stamp + 1, (ClassRule("c", "local"),))
    net.add_broker("wiser", classes=newer)
    net.run(1.0)
    assert net.controller.rules == newer
    assert net.registrants["near"].rules[-1] == newer


def test_rules_of_a_brokers_configuration_are_where_changes_begin() -> None:
    net = Net()
    net.add_broker("b", classes=ClassRules(0, (ClassRule("a/#", "local"),)))
    net.run(1.0)
    assert not net.registrants["b"].rules
    net.controller.set_class("b/#", "local", net.now)
    net.machines["controller"].flush()
    net.run(1.0)
    assert net.registrants["b"].rules[-1].rules == (ClassRule("a/#", "local"), ClassRule("b/#", "local"))
