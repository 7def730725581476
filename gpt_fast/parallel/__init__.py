"""One model in several processes, its ranks: who they are, and what they tell each other."""
