"""Speed of the bias's construction, beside other builders."""
