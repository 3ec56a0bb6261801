"""A maze in words, learned offline from the wanderings of a policy that hardly knows the way."""
