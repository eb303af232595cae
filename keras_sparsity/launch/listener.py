"""Hears from the ranks who of them is lost, and how a new process joins."""

import json
import socket
import threading

from keras_sparsity.health import channel
from keras_sparsity.machines import addresses, door, packet_filter


class Listener:
    """Listens, while entered, if a launch has dedicated servers.

    Without them, no rank may be lost.

    Args:
        places: List of `Place`, by rank.
        here: This machine's address for the ranks; by default loopback.
        networks: Networks of the ranks' machines; None for any.

    Attributes:
        lost: Set of the ranks without which the others go on.
        facts: How a new process of a lost rank joins; None if it cannot.
    """

    def __init__(self, places, here=None, networks=None):
        self._here, self._networks = here, networks
        self._is_needed = any(place.is_server for place in places)
        self._door = None
        self.lost, self.facts = set(), None

    def __enter__(self):
        if self._is_needed:
            address = addresses.to_bind(self._here)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family)
            if self._networks is not None:
                packet_filter.restrict(server, self._networks)
            hosts = [self._here or address]
            self._door = channel.Door(server, hosts, self._admit)
        return self

    def __exit__(self, *exception):
        if self._door:
            self._door.close()

    def variables(self, restarts=False):
        """The environment variables by which ranks reach this launcher.

        Args:
            restarts: Whether it starts lost ranks anew.
        """
        if not self._door:
            return {}
        facts = {**self._door.facts, "restarts": restarts}
        return {door.LAUNCHER_VARIABLE: json.dumps(facts)}

    def _admit(self, rank, ranks_channel):
        threading.Thread(
            target=self._hear, args=(ranks_channel,), daemon=True
        ).start()

    def _hear(self, ranks_channel):
        """Hears of a rank that is `lost`, and of the `facts` or None."""
        while message := ranks_channel.receive():
            if "facts" in message:
                self.facts = message["facts"]
            else:
                self.lost.add(message["lost"])
        ranks_channel.close()
