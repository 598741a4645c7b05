"""HTTP itself: connections, bodies, errors, answers, and the routes for operators."""
