"""`paceline bench peers`: the same prompts on other systems."""
