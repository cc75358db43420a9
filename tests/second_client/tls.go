package main

// Certificates and tokens: section 17.

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"net/http"
	"os"
	"path/filepath"
)

// identity is a device's folder of keys: ca.crt, device.crt, device.key, and maybe a token.
type identity struct{ folder, federation, cid, enrolURL string }

func (i identity) file(name string) string { return filepath.Join(i.folder, name) }

func (i identity) authority() *x509.CertPool {
	pool, text := x509.NewCertPool(), mustRead(i.file("ca.crt"))
	if !pool.AppendCertsFromPEM(text) {
		panic("ca.crt holds no certificate")
	}
	return pool
}

// config trusts this federation's authority alone, and checks its own certificate before it dials.
func (i identity) config() *tls.Config {
	pair, err := tls.LoadX509KeyPair(i.file("device.crt"), i.file("device.key"))
	must(err)
	own, err := x509.ParseCertificate(pair.Certificate[0])
	must(err)
	if own.Subject.CommonName != i.cid || len(own.Subject.Organization) != 1 || own.Subject.Organization[0] != i.federation {
		panic("device.crt belongs to another device or federation")
	}
	return &tls.Config{RootCAs: i.authority(), Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

// enrol turns a one-time token into a certificate. The key stays where it was made, so the same request can be sent again.
func (i identity) enrol() {
	if _, err := os.Stat(i.file("device.crt")); err == nil {
		return
	}
	if _, err := os.Stat(i.file("device.key")); err != nil {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		must(err)
		raw, err := x509.MarshalPKCS8PrivateKey(key)
		must(err)
		must(os.WriteFile(i.file("device.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
	}
	block, _ := pem.Decode(mustRead(i.file("device.key")))
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	must(err)
	subject := pkix.Name{Organization: []string{i.federation}, CommonName: i.cid}
	raw, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	must(err)
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: raw})
	body := writeJSON(object{"token": string(bytes.TrimSpace(mustRead(i.file("token")))), "csr": string(request)})
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: i.authority(), MinVersion: tls.VersionTLS12}}}
	answer, err := client.Post(i.enrolURL+"/enrol", "application/json", bytes.NewReader(body))
	must(err)
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, 65536))
	must(err)
	said := readObject(text)
	certificate, given := said["certificate"].(string)
	if !given {
		panic("not enrolled: " + string(text))
	}
	must(os.WriteFile(i.file("device.crt"), []byte(certificate), 0o644))
	os.Remove(i.file("token"))
}

func mustRead(path string) []byte {
	text, err := os.ReadFile(path)
	must(err)
	return text
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
