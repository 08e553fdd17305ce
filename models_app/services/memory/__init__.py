"""What the KV memory of instances is and may be: what fits where, limits asked and in force, rules, growth."""
