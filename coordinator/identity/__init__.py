"""Who may take part: certificates, revocation, enrolment tokens, broker access rules, and the signing key."""
