"""One request's sessions on the target and on the draft service, and the links that they share."""
