"""Find the cheapest recipe of every site that meets a target, and write it as a policy."""
