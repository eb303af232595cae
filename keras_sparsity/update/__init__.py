"""From gradients of all ranks to the rule of an optimizer."""
