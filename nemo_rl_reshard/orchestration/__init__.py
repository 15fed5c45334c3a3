"""Ray actors of both sides and the controller that drives them."""
