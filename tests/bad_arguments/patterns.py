"""What the errors of several rooms say."""

INTEGER = "must be a positive integer.*Received: "
