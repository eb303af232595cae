"""Pulls with `prefetch`: most rows arrive in the step before."""

import tensorflow as tf

from keras_sparsity.exchange.owned_rows import OwnedRows, checked
from keras_sparsity.exchange.pull import Pull, Request, expanded
from keras_sparsity.exchange.routes import Direct


class PrefetchedPull(Pull):
    """Receives rows that the step before asked for, and asks for the next.

    Args:
        requests: list of `(tables, ids)` of this step, see `PullNow`.
        following: the same of the next step: other ids of the same tables.
        ahead: `Ahead` of these tables.
    """

    is_prefetched = True

    def __init__(self, requests, following, ahead):
        self._exchange, self._ahead = ahead.exchange, ahead
        self._request = Request(self._exchange, requests)
        # Its last batch has no ids, see `JointPull`.
        self._following = Request(self._exchange, following, tf.identity)
        self._route = Direct(self._exchange)
        self._announced = self._late = None
        self.sent, self.arrived = [], None

    def ask(self):
        self._announced = self._ahead.announce(self._following)
        return []  # the step before asked for this step's rows

    def resume(self, behind):
        """Sends rows that the step before asked for; a list of tensors."""
        with tf.control_dependencies(behind):
            self._late = self._ahead.pull(self._request)
        return [self._late.rows, *self._announced.last_messages]

    def check(self, behind):
        with tf.control_dependencies(behind):
            self.arrived = self._late.settle(self._route, self._pull_anew)
        return [self.arrived]

    def rows(self, behind):
        owned = OwnedRows(self._exchange, self._route.received)
        return expanded(self._request, self._route, owned, self.arrived)

    def finish(self, behind):
        """Sends rows of the next step."""
        self._ahead.send(self._announced, behind)

    def _pull_anew(self):
        route = self._route
        route.ask(self._request)
        route.received = checked(self._exchange, route.received)
        return route.pull(OwnedRows(self._exchange, route.received).rows())
