package main

// Keys, shares and seals of a masked sum: section 21.

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"math/big"
	"sort"
	"strings"

	"golang.org/x/crypto/curve25519"
)

var prime = new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 255), big.NewInt(19))

func hkdf(secret []byte, label string, size int) []byte {
	mac := func(key []byte, parts ...[]byte) []byte {
		h := hmac.New(sha256.New, key)
		for _, part := range parts {
			h.Write(part)
		}
		return h.Sum(nil)
	}
	return mac(mac(make([]byte, 32), secret), []byte(label), []byte{1})[:size] // no key here has more than one hash's bytes
}

func x25519(private, public []byte) []byte {
	shared, err := curve25519.X25519(private, public)
	need(err == nil, "bad_field", "a public key of small order")
	return shared
}

func stream(key []byte, size int) []byte {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err)
	}
	out := make([]byte, size)
	cipher.NewCTR(block, make([]byte, 16)).XORKeyStream(out, out)
	return out
}

// keys of a prekey's root
func prekeyLabel(x string) string      { return "fedcenters/v1/prekey\n" + x + "\n" }
func sealPrivate(root []byte) []byte   { return hkdf(root, prekeyLabel("seal"), 32) }
func maskSecret(root []byte) []byte    { return hkdf(root, prekeyLabel("mask secret"), 31) }
func maskPrivate(secret []byte) []byte { return hkdf(secret, prekeyLabel("mask key"), 32) }
func publicKey(private []byte) []byte  { return x25519(private, curve25519.Basepoint) }
func publicKeys(root []byte) []byte {
	return append(publicKey(sealPrivate(root)), publicKey(maskPrivate(maskSecret(root)))...)
}
func littleEndian(number []byte) []byte { return reversed(number) }

func reversed(bytes []byte) []byte {
	out := make([]byte, len(bytes))
	for i, b := range bytes {
		out[len(bytes)-1-i] = b
	}
	return out
}

// sumOf is a device's part in one sum: it lives in the state file from the roster to the reveal.
type sumOf struct {
	Federation, Run, Roster, Cid    string
	Round, Exchange, Number         int64
	Root                            []byte
	Devices, Threshold, Words, Bits int64
	Neighbours                      map[string][]byte // public keys
	RosterText, RelayText           []byte
	Envelopes                       map[string][]byte // of the active neighbours
	Upload                          []byte
	Shown                           map[string]string
}

func (s *sumOf) label(purpose string, parts ...string) string {
	head := fmt.Sprintf("fedcenters/v1/sum\n%s\n%s\n%d\n%d\n%s\n%s\n", s.Federation, s.Run, s.Round, s.Exchange, s.Roster, purpose)
	return head + strings.Join(append(parts, ""), "\n")
}

func (s *sumOf) selfSecret() []byte  { return hkdf(s.Root, s.label("self secret"), 31) }
func (s *sumOf) selfMaskKey() []byte { return hkdf(s.selfSecret(), s.label("self mask"), 16) }

func (s *sumOf) pairMaskKey(other string) []byte {
	low, high := s.Cid, other
	if high < low {
		low, high = high, low
	}
	return hkdf(x25519(maskPrivate(maskSecret(s.Root)), s.Neighbours[other][32:]), s.label("pair mask", low, high), 16)
}

func (s *sumOf) commitment() []byte {
	sum := sha256.Sum256(append([]byte(s.label("commitment", s.Cid)), s.selfSecret()...))
	return sum[:]
}

func (s *sumOf) digest(kind, dealer, holder string, share []byte) []byte {
	sum := sha256.Sum256(append([]byte(s.label("share", kind, dealer, holder)), share...))
	return sum[:16]
}

func (s *sumOf) others() []string {
	names := []string{}
	for name := range s.Neighbours {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// shares of a secret, one for each of the first `count` places.
func (s *sumOf) shares(kind string, secret []byte, count int) [][]byte {
	coefficients := []*big.Int{new(big.Int).SetBytes(reversed(secret))}
	bytes := stream(hkdf(s.Root, s.label("polynomial", kind), 16), 48*int(s.Threshold-1))
	for ; len(bytes) > 0; bytes = bytes[48:] {
		c := new(big.Int).SetBytes(reversed(bytes[:48]))
		coefficients = append(coefficients, c.Mod(c, prime))
	}
	out := [][]byte{}
	for x := int64(1); x <= int64(count); x++ {
		value := new(big.Int)
		for i := len(coefficients) - 1; i >= 0; i-- {
			value.Mod(value.Add(value.Mul(value, big.NewInt(x)), coefficients[i]), prime)
		}
		out = append(out, reversed(value.FillBytes(make([]byte, 32))))
	}
	return out
}

func (s *sumOf) sealing(sender, receiver string) (cipher.AEAD, []byte) {
	other := sender
	if sender == s.Cid {
		other = receiver
	}
	label := s.label("seal", sender, receiver)
	block, _ := aes.NewCipher(hkdf(x25519(sealPrivate(s.Root), s.Neighbours[other][:32]), label, 32))
	gcm, _ := cipher.NewGCM(block)
	return gcm, []byte(label)
}
