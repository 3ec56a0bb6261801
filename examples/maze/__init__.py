"""A maze in words, learned offline from episodes of a policy that hardly knows the way."""
