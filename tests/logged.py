"""Messages that a logger has had, for tests of what is said."""

import functools
import logging


def with_messages_of(name):
    """Gives a function the messages of a logger that it causes.

    Args:
        name: the logger's.

    Returns:
        Decorator of a function whose first argument is that list.
    """

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            messages = []
            handler = logging.Handler()
            handler.emit = lambda record: messages.append(record.getMessage())
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            try:
                return function(messages, *args)
            finally:
                logger.removeHandler(handler)

        return wrapper

    return decorate
