"""From and to other forms of weights, and from here to elsewhere."""
